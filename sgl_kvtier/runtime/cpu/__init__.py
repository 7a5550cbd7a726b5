"""The CPU reference platform: what a real SGLang server needs without an accelerator."""
