"""Restoration of requests: whether it pays, where the prefill and load cursors meet, and which
request gets the chunked-prefill slot.
"""
