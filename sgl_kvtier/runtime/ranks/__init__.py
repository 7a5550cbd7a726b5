"""What ranks and pipeline stages agree on."""
