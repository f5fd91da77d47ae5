"""The dense model when one rule of data, weights or training is not kept, for diagnoses.

Every file has its rules in `WHAT_IFS`; a feature with rules of its own adds a file to the list of `rules`.
"""
