"""The loss of the dense model; below `reference.model`, whose branches have losses of their own."""
