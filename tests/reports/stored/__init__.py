"""Tests of reading runs: frames, summaries, former layouts, torn and hostile files."""
