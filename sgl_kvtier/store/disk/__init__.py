"""Bytes and folders on disk."""
