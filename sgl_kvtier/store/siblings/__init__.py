"""Folders of other owners that hold the same pages: followed and read, never written."""
