"""What "equal" means where two chunk sizes of one server do not give equal numbers."""
