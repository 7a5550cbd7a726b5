"""Carries out lookahead: page moves, evictions, the map's facts."""
