"""Tests of the engine whose ranks are threads of this process."""
