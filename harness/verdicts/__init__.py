"""Verdicts and failed checks as records, their rows in `verdicts.jsonl`, and the one file that makes words of them."""
