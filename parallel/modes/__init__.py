"""One mode, one file: its table, its choices, its closed form."""
