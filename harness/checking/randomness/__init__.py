"""Checks of random numbers: exact tests, and what they compare of masks and initial values."""
