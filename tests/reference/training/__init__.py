"""Tests of the dense model, its parameters and its training."""
