"""What makes the words of randomness legal together: `dropout attention_dropout random`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["SOURCES", "WORDS", "problems"]

SOURCES = ("field", "stateful")
WORDS: Mapping[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "random": "field"}
"""Each word with its default: no dropout."""


def problems(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, the rule that it breaks and a legal value, of every broken rule."""
    for key in ("dropout", "attention_dropout"):
        if not 0 <= v[key] < 1:
            yield key, "must lie in [0, 1)", f"{key}=0.1"
    if v["random"] != "field" and not (v["dropout"] or v["attention_dropout"]):
        yield "random", "is where masks come from, and without dropout there are none", "random=field"
