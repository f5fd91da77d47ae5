"""Tests of files, packing and batches."""
