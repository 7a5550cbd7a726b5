"""Which page is where, in memory, and where the next one goes."""
