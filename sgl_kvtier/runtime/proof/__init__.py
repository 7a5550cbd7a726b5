"""A server's proof, on its own device, that what it restores is right."""
