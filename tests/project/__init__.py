"""Tests of the repository: its rules, its documents, its recipe for CI."""
