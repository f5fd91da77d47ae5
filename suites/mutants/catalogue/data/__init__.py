"""Bugs of the data path: batches, positions, what is shared with the reference, steps and counts."""
