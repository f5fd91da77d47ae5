"""Whole programs recorded as they are: every rank of a training script writes its part of one run folder as it goes."""
