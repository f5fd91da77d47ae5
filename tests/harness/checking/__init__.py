"""Tests of outcomes, tolerances and checks."""
