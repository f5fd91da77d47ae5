"""Tests of predicted bytes and memory."""
