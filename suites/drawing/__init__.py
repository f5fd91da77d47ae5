"""Cases to draw: Hypothesis strategies, their profiles, rows that cover every pair of boolean words."""
