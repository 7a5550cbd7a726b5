"""The CPU reference platform: everything the real SGLang server needs to run without an
accelerator.
"""
