"""Bugs planted from outside in our own implementation."""
