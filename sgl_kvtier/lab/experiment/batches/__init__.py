"""Several restorations at once."""
