"""Tests of diagnoses: first places, causes, six-line messages, stand-alone scripts."""
