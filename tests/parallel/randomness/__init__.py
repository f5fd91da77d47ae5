"""Tests of `parallel.randomness`."""
