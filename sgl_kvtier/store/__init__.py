"""The page store: keeps bytes under keys on local disk, verified on every read."""
