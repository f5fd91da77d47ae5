"""Tests of tolerances and checks."""
