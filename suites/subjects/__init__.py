"""Implementations that the suites and the README point at."""
