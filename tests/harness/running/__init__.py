"""Tests of a run: requests, subjects, cases, verdicts, the run folder, interruptions."""
