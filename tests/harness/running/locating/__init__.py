"""Tests of the search for the first wrong module: subjects that declare no layout of their activations."""
