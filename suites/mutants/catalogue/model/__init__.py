"""Bugs of the model: its rules, the layout of weights, vocabulary and loss, norms, uneven shares."""
