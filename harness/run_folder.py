"""The layout of a run folder has a number, in `env.json` under `schema`; readers take it and all former ones.

1    folders without a number: `verdicts.jsonl` may lack `of`, errors.csv and tracebacks/ may be missing
2    the number itself
"""

from __future__ import annotations

__all__ = ["SCHEMA"]

SCHEMA = 2
"""What is written now. Increase it when a reader of the former layout would misread what is written."""
