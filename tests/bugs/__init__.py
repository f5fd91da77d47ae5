"""Tests of the format of planted bugs."""
