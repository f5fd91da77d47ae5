"""Tests of the dense model with a bug read into it."""
