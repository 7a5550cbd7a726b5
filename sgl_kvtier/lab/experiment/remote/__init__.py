"""Two servers on one remote store, at the speed of a network."""
