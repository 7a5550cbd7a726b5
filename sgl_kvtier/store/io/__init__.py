"""I/O threads: who moves the bytes of pages."""
