"""Recorded programs whose ranks are threads of one process, in place of those that torchrun starts."""
