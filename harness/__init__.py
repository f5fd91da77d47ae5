"""Runs ranks, records, annotates, compares; knows no model."""
