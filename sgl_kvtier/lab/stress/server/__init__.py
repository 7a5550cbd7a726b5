"""`kvtier bench restore-fuzz` and `kvtier bench equal`: a server in trouble, seen from outside."""
