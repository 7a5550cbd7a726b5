"""What the parts of one scheduler step share."""
