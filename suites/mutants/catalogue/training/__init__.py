"""Bugs of the step: optimizer, loop, shares of updates, what is reported."""
