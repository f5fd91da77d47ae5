"""Outcomes of a subject: its values as blocks, blocks merged."""
