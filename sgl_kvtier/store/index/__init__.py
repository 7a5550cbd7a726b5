"""Which page is in which slot, in memory, and which slot the next page gets."""
