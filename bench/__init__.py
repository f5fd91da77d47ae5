"""Campaigns as commands: speed, costs, false alarms, broken programs, other versions of torch, two commits."""
