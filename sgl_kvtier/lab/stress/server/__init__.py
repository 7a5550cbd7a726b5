"""`kvtier bench restore-fuzz`: a server in trouble, seen from outside."""
