"""Tests of what is printed and written from a stored run."""
