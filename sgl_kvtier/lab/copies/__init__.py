"""`kvtier bench copies` and `kvtier bench copy-table`."""
