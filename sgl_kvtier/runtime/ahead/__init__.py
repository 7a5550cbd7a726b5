"""Carries out lookahead: page moves, evictions, facts for the map of pages."""
