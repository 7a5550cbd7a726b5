"""`kvtier stat`, `fsck` and `purge`."""
