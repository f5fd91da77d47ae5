"""Layouts on a cluster that is not here: candidates, forecasts, what would make a case fit."""
