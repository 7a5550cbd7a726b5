"""Measurements that need a card alone. Imports torch."""
