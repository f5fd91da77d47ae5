"""Bugs of what is sent: reductions, boundaries of a mode, factors, groups, order, overlap."""
