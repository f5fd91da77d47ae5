"""Run folders told as frames, tables, plots and pages; the command line."""
