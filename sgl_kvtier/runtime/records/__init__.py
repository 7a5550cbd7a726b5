"""Files that a server writes: decision log and learned profile."""
