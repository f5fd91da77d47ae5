"""The first folder on the PYTHONPATH of a recorded program: Python imports its `sitecustomize` at the start."""
