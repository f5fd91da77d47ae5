"""Causes: their ids, the proof that numbers give them, hypotheses that find them, and how these rank."""
