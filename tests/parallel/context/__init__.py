"""Tests of `parallel.context`."""
