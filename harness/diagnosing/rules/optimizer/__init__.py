"""What an optimizer did wrong: to its moments, to parameters, by clipping."""
