"""Tests of what is read after a hang."""
