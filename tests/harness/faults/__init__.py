"""Tests of disturbed collectives, of ranks that are out of step, and of races."""
