"""Campaigns as commands: speed, costs, false alarms, other systems, two commits."""
