"""Tests of reading runs: frames, summaries, maps of failures, torn and hostile files."""
