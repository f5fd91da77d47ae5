"""Errors of an optimizer: of its moments, of parameters, by clipping."""
