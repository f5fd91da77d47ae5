"""Tests of the implementation in `parallel`, part by part."""
