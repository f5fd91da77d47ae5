"""Causes: their ids, how numbers prove them, the hypotheses that find them, and their ranking."""
