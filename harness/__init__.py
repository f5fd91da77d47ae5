"""Runs ranks, records, annotates, compares; knows no model.

The files here are the words of a run: case in, execution, evidence, checks, diagnosis, store. Behind them stand
`engines` (how ranks run), `recording` (what the recorder is made of), `checking` (the checks, kind by kind),
`diagnosing` (what tells a failure), `predicting` (machines that are not here), `witnesses` (profilers that agree) and
`torch_internals` (the only private names of torch).
"""
