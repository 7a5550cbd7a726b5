"""Stores in front of a store: faults, a throttled link, reading ahead."""
