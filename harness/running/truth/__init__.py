"""Truths of a subject: the decoder of `reference`, a dense model of its own, or itself on one rank."""
