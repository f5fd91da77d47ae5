"""Interventions for the in-process engine: disturbed calls and drawn schedules."""
