"""Lookahead: which pages to move before their request or session runs."""
