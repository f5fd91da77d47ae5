"""Tests of the recorder against the torch profiler and Nsight Systems."""
