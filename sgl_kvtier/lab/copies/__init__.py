"""`kvtier bench copies`."""
