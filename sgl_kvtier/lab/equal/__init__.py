"""The meaning of "equal" where two chunk sizes of one server do not give equal numbers."""
