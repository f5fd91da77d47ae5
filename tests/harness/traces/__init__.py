"""Tests of the readers of traces."""
