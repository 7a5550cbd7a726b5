"""POST /kvtier/hint: clients say when a session returns."""
