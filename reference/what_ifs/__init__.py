"""The dense model when one rule of data, weights or training is not kept, for diagnoses.

A file has its rules in `WHAT_IFS` and is found by name: a feature with rules of its own adds a file.
"""
