"""Hypotheses on what went wrong: each looks for one kind of mistake in numbers or calls, and names its cause."""
