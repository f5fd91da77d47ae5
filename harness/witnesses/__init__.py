"""Independent ways to see the same events."""
