"""What makes the words of context parallelism legal together: `cp cp_comm cp_inner cp_slices`.

Slices are equal: zigzag cuts a row into 2*cp chunks (Megatron-Core asserts the same), contiguous into cp, and a mode
that splits the sequence splits a slice once more. An exchange of tokens for heads needs whole heads on every rank.
Sources: around.md 12.2, 14, 18.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from reference.case.modes import mode_of

__all__ = ["METHODS", "ORDERS", "WORDS", "problems"]

METHODS = ("ring", "gather", "alltoall", "alltoall-ring")
ORDERS = ("zigzag", "contiguous")
WORDS: Mapping[str, Any] = {"cp": 1, "cp_comm": "ring", "cp_inner": 1, "cp_slices": "zigzag"}
"""Each word with its default: no context ranks."""


def problems(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, the rule that it breaks and a legal value, of every broken rule."""
    cp, inner = v["cp"], v["cp_inner"]
    if cp == 1:
        for key, plain in WORDS.items():
            if v[key] != plain:
                yield key, "is about context ranks, and cp=1 has one", f"{key}={plain}"
        return
    if mode_of(v).uneven:
        yield "cp", f"mode={v['mode']} has no context parallelism", "cp=1"
    if v["metric"]:
        yield "metric", "is summed over tp alone, and context ranks hold other tokens", "metric=false"
    if v["shard"]:
        yield "shard", f"shares parameters among data ranks, and with cp={cp} context ranks are among them", "shard=0"
    unit = cp * (2 if v["cp_slices"] == "zigzag" else 1) * (v["tp"] if mode_of(v).sequence else 1)
    if (v["seq"] * v["batch"] if v["packed"] else v["seq"]) % unit:
        rule = f"mode={v['mode']} with cp={cp} and cp_slices={v['cp_slices']} cuts a row into {unit} equal parts"
        yield "seq", rule, f"seq={-(-v['seq'] // unit) * unit}"
    if v["cp_comm"] == "alltoall-ring" and (inner in (1, cp) or cp % inner):
        legal = next((size for size in range(2, cp) if cp % size == 0), 0)
        rule = f"must divide cp={cp} and be neither 1 nor all of it"
        yield "cp_inner", rule, f"cp_inner={legal}" if legal else "cp=4 cp_inner=2"
    if v["cp_comm"] != "alltoall-ring" and inner != 1:
        yield "cp_inner", f"cp_comm={v['cp_comm']} has one level", "cp_inner=1"
    if v["cp_comm"] in ("alltoall", "alltoall-ring"):
        yield from _heads(v, inner if inner > 1 else cp)


def _heads(v: Mapping[str, Any], ranks: int) -> Iterator[tuple[str, str, str]]:
    """An exchange over this many ranks: whole query heads, and whole kv heads or whole copies of one."""
    tp = v["tp"]
    if v["heads"] // tp % ranks:
        rule = f"the {v['heads'] // tp} of a rank must be a multiple of the {ranks} ranks that exchange them"
        yield "heads", rule, f"heads={math.lcm(tp * ranks, v['kv_heads'])}"
    own = max(v["kv_heads"], tp) // tp
    if own % ranks and ranks % own:
        rule = f"the {own} of a rank must divide the {ranks} ranks that exchange them, or be a multiple"
        yield "kv_heads", rule, f"kv_heads={tp}"
