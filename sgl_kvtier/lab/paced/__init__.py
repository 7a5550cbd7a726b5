"""A device for SGLang's CPU platform that computes nothing and takes the time that a profile gives
for an accelerator.
"""
