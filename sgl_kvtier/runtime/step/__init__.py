"""State that the modules working in one scheduler step share."""
