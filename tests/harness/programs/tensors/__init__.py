"""Tests of the recorder of values inside a program."""
