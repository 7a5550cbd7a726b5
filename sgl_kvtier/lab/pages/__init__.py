"""Tables, plots and HTML pages of results."""
