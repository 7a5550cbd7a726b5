"""What is measured on a card alone. Imports torch."""
