"""When a session is expected to return."""
