"""Tests of parity: two launches of one program."""
