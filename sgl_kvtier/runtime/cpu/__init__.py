"""The CPU reference platform: what the real SGLang server needs to run where there is no
accelerator.
"""
