"""Tests of predicted bytes, times and memory."""
