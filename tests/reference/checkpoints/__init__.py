"""Tests of checkpoints of other systems and of torch's format."""
