"""Pipeline stages against the dense model."""
