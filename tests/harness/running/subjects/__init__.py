"""Subjects and their freedom: names, modes, own errors, other folders, kept processes."""
