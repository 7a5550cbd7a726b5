"""The remote store against the engine's own client, and under injected faults."""
