"""The decoder on one rank: the strategy, all that the schemes of a case decide, and the transformer under it."""
