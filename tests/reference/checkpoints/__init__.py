"""Tests of rank orders, layouts and pipelines."""
