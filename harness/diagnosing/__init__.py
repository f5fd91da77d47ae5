"""Explains a failure: its first wrong place, causes tested on its numbers, six lines, scripts that repeat it."""
