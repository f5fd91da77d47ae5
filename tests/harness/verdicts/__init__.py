"""Tests of verdicts as records: their rows, their schema, and the one file that makes words of them."""
