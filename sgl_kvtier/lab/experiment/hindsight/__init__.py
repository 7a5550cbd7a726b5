"""What could have been, beside what was measured."""
