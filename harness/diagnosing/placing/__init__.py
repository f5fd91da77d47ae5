"""The first wrong module of a subject that does not say how its activations lie."""
