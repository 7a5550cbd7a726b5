"""`kvtier bench attention`."""
