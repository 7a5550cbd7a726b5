"""The tables and the page of `kvtier compare`."""
