"""Tests of the case language and the default cases."""
