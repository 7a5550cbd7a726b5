"""One store of two: pages on local disk, and those of other servers."""
