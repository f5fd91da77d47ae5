"""Numbers as tables of text, and the only code that prints."""
