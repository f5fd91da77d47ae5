"""Fault injection: every fault of a subject's collectives, one after another, and the kill matrix that comes of it."""
