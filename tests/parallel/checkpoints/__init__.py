"""Checkpoints saved at one layout and loaded at another."""
