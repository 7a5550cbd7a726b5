"""What needs a GPU: measurements, checks and models. Imports torch."""
