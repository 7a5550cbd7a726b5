"""Restoring a request: whether it pays, where both ends meet, and who gets the prefill slot."""
