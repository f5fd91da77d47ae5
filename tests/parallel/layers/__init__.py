"""Tests of linear layers and of random numbers."""
