"""The training of one rank under a strategy: the plain step, part by part, and the loop over the steps."""
