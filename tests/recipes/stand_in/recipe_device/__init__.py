"""A device that computes nothing, for models with any kind of cache: tests/recipes/README.md."""
