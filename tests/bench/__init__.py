"""Tests of the campaigns."""
