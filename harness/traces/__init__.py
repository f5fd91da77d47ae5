"""Traces of other people's jobs, one reader a format: what each rank called, as far as the trace knows it."""
