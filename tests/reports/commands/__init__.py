"""Tests of single commands: requests, output, exit status."""
