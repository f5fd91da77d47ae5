"""What the dense model computes under a known mistake: a diagnosis compares these with what was found."""
