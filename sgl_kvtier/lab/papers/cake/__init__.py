"""Cake's tables and figures."""
