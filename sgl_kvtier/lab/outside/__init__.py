"""Servers and clients over HTTP: starting, asking, replaying."""
