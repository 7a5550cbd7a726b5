"""What SGLang imports in the place of its own models (SGLANG_EXTERNAL_MODEL_PACKAGE)."""
