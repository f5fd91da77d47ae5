"""Tests of the HTML page: its figures, pictures and what a browser shows."""
