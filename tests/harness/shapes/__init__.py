"""Tests of the dry engine, and of what the harness takes from torch that is not documented."""
