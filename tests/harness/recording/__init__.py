"""Tests of the recorder: calls, phases, regions, ranges, activations."""
