"""Tests of outcomes of a subject: its values as blocks, and blocks merged."""
