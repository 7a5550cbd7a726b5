"""Checks on the server's own device that restored KV is correct."""
