"""What makes the words of randomness legal together: `dropout attention_dropout random init`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["INITIAL", "SOURCES", "WORDS", "problems"]

SOURCES = ("field", "stateful")
INITIAL = ("whole", "field", "shard")
WORDS: Mapping[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0, "random": "field", "init": "whole"}
"""Each word with its default: no dropout, and the weights that the case has by seed and name."""


def problems(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, the rule that it breaks and a legal value, of every broken rule."""
    for key in ("dropout", "attention_dropout"):
        if not 0 <= v[key] < 1:
            yield key, "must lie in [0, 1)", f"{key}=0.1"
    if v["random"] != "field" and not (v["dropout"] or v["attention_dropout"]):
        yield "random", "is where masks come from, and without dropout there are none", "random=field"
    if v["init"] != "whole" and v["load"]:
        yield "init", "is about values at the beginning, and load= brings those of a checkpoint", "init=whole"
    if v["init"] == "shard" and v["mode"] == "autotp":
        yield "init", "ranks draw no shards in mode=autotp: AutoTP cuts weights that it loads", "init=field"
    if v["init"] == "shard" and v["pp"] > 1 and v["tied"]:
        yield "init", "draws on each stage by itself, and tied=true has one table on two stages", "tied=false"
