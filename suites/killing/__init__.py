"""Which check notices which planted bug: the kill matrix, and the collectives that no check would miss."""
