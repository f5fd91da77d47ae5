"""Tests of the engines whose ranks are processes."""
