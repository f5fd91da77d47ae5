"""Results of the dense model under a known mistake: a diagnosis compares these with what was found."""
