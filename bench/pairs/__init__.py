"""The search for the default cases: `search` finds cases for pairs of values, `cases` says what they cost."""
