"""Weights that are split over an axis and whole only while they are used: linears, tables, and who gathers when."""
