"""Tests of `reference.features`."""
