"""Words of the table of a prediction beside its numbers: the step, and why a case is not the first."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from shardproof.harness.predicting.clusters import Cluster

_GIB = 2**30
_LEAST = 0.005
"""A part of less than this share of the first candidate's time is left out."""
_MEMORY = ("parameters", "gradients", "optimizer", "saved")


def reasons(rows: pd.DataFrame, cluster: Cluster) -> list[str]:
    """Texts by row, "" for the first and for cases that cannot be.

    Time is that of a GPU for each of its tokens where tokens are known, for meshes differ in data, else of a step.
    """
    records: list[dict[str, Any]] = [{str(key): value for key, value in row.items()} for row in rows.to_dict("records")]
    return ["" if not number else _reason(row, records[0], cluster) for number, row in enumerate(records)]


def _reason(row: Mapping[str, Any], first: Mapping[str, Any], cluster: Cluster) -> str:
    if row["fits"] == "no":
        parts = {name: float(row[f"{name}_bytes"]) / _GIB for name in _MEMORY}
        most = max(parts, key=parts.__getitem__)
        more = float(row["peak_bytes"]) / _GIB - cluster.device.memory_gib
        return f"{more:.3g} GiB too many; {most} {parts[most]:.3g} GiB"
    if row["fits"] != "yes" or first["fits"] != "yes":
        return ""
    mine, best = _seconds(row), _seconds(first)
    whole = sum(best.values())
    slower = sum(mine.values()) / whole - 1
    if slower < _LEAST:
        return "as fast"
    shares = {part: (mine[part] - best[part]) / whole for part in mine}
    largest = sorted(shares, key=lambda part: -abs(shares[part]))
    changes = [f"{part} {shares[part]:+.1%}" for part in largest if abs(shares[part]) >= _LEAST]
    return f"{slower:.1%} slower: {', '.join(changes)}"


def _seconds(row: Mapping[str, Any]) -> dict[str, float]:
    """The time of a step, or of a token, by what it goes to."""
    whole, computes, waits = (float(row[name]) for name in ("step_s", "compute_s", "exposed_s"))
    speed = row["tokens_per_s_per_rank"]
    scale = 1.0 if speed is None or pd.isna(speed) or not speed else 1.0 / (float(speed) * whole)
    stages = max(0.0, whole - computes - waits) if math.isfinite(whole) else 0.0
    return {"computing": computes * scale, "waiting for calls": waits * scale, "waiting for stages": stages * scale}


def step_words(rows: pd.DataFrame) -> str:
    """The batch and the length of its sequences: "a step: seq=2048 batch=1 micro=8 on every data rank; "."""
    sizes_by_word = {name: sorted({int(size) for size in rows[name].dropna()}) for name in ("seq", "batch", "micro")}
    words = " ".join(f"{name}={'|'.join(map(str, sizes))}" for name, sizes in sizes_by_word.items() if sizes)
    tokens = sorted({int(count) for count in rows["tokens"].dropna()})
    whole = f", {'|'.join(f'{count:,}' for count in tokens)} tokens on all" if tokens else ""
    return f"a step: {words} on every data rank{whole}; " if words else ""
