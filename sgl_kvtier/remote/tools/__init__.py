"""`kvtier remote up`."""
