"""Tests of baselines, regression reports and intervals."""
