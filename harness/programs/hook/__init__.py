"""The folder that a recorded program has first on PYTHONPATH: Python imports the `sitecustomize` in it at its start."""
