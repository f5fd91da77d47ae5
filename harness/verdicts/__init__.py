"""Verdicts and failed checks as records, their rows in `verdicts.jsonl`, and their sentences, in one place."""
