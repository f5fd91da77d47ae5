"""Recorded programs whose ranks are threads of one process, in the place of those that torchrun starts."""
