"""Tests of recorded programs: their figures, findings and comment."""
