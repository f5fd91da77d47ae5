"""Independent observers of the same events."""
