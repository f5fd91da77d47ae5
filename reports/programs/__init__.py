"""Recorded programs: the command that records one, and the figures of what it did."""
