"""`kvtier bench copy-table`."""
