"""The commands that compare: each says what is measured and what follows from it."""
