"""Tests of the harness, a folder for each of its folders, and the subjects and evidence that several of them use."""
