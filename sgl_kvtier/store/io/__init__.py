"""I/O threads: they read and write pages."""
