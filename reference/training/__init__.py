"""Dense training: the steps and their states, the control run, and how far rounding may carry a right result."""
