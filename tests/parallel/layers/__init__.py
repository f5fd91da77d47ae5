"""Tests of the modules of a transformer on one rank."""
