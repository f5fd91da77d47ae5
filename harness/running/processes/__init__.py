"""Processes that prove cases: started by a fork, or kept ready; and a Ctrl-C while something is written whole."""
