"""Tests of what all engines do alike."""
