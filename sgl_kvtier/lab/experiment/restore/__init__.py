"""`kvtier compare restore`."""
