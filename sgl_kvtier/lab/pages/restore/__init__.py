"""Results of restorations: the grid of one, and batches."""
