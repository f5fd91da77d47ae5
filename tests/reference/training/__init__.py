"""Tests of the bounds of scaled gradients."""
