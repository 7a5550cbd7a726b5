"""`kvtier bench restore-fuzz`: sessions against a server in trouble."""
