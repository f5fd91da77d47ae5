"""Location after a failure, by further runs: the first wrong module without a declared layout, unequal draws."""
