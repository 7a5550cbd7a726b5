"""State that the parts of one scheduler step share."""
