"""Tests of rules and groups."""
