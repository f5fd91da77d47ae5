"""Checks of random numbers: exact tests, and what they are asked of masks and initial values."""
