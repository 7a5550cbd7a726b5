"""The papers' experiments in virtual time, beside the numbers as printed."""
