"""I/O threads: they move the bytes of pages."""
