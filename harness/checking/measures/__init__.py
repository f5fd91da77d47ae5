"""How far a number is from the right one, how far a right one may be, and how improbable a count is. No verdicts."""
