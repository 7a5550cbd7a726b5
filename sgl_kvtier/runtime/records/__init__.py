"""What a server writes down: decision log and learned profile."""
