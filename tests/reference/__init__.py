"""Tests of the dense model and its data."""
