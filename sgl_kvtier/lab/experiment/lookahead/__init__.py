"""`kvtier compare lookahead`."""
