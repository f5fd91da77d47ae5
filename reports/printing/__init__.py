"""Numbers as tables of text, and the only place that prints."""
