"""Tests of recording whole programs."""
