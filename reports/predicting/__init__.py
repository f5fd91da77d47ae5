"""Candidates of a prediction, their memory and bytes, and whether they fit."""
