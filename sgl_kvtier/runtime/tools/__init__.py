"""Commands that inspect a machine or a server."""
