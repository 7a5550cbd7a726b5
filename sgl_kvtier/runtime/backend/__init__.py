"""The HiCache storage backend."""
