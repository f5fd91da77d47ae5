"""Interventions for the in-process engine: disturbed calls, drawn schedules, and what reads a call's result."""
