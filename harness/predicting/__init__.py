"""Forecasts of cases on machines that are not here: dry runs, clusters, and the costs of calls and products."""
