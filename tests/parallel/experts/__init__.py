"""Tests of `parallel.experts`."""
