"""The CPU reference platform: all that the real SGLang server needs without an accelerator."""
