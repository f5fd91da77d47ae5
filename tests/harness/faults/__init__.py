"""Tests of disturbed collectives, of the survey of what they prove, and of races."""
