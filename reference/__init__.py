"""The truth: dense, single process, torch only."""
