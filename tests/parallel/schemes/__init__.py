"""Tests of the modes of `parallel`: rows of closed forms, calls, shapes, variants."""
