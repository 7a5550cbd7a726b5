"""Restoring a request: whether it pays, where both ends meet, and which request gets the prefill
slot.
"""
