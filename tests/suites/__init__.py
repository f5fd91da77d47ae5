"""Tests of the pytest plugin, the suites and the catalogue of mutants."""
