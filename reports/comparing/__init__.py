"""Two runs, a run and a baseline, or the modes of one run side by side."""
