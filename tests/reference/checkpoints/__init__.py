"""Tests of torch's format of checkpoints, as other systems write it too."""
