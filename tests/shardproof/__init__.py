"""Tests of the public face: the names that users import, and packages of theirs with the names of our folders."""
