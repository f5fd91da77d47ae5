"""How fast a recorded program was: tokens and bandwidth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from harness.predicting.clusters import read
from harness.predicting.costs import route
from reports.programs.figures import grouped, steps
from reports.stored.frames import Run


def step_s(run: Run) -> float:
    """Seconds of a step: the median over steps of the slowest rank."""
    return float(steps(run).groupby("step")["step_us"].max().median()) / 1e6


def speed(run: Run) -> Iterator[tuple[str, str]]:
    """What and how much: tokens a second where the recording was given them."""
    took = step_s(run)
    if math.isnan(took) or not took:
        return
    if tokens := run.env.get("stated", {}).get("tokens"):
        yield "tokens a second", f"{tokens / took:,.0f}"
        yield "tokens a second and rank", f"{tokens / took / max(1, run.ledger['rank'].nunique()):,.0f}"


def bandwidth(run: Run) -> pd.DataFrame:
    """op, axis, group_size, calls, wire_bytes, gb_s (wire bytes over the time inside the calls, waiting for late ranks
    included), link, share (of what one rank can send through it, NaN without a cluster); calls of known duration.
    """
    events = grouped(run)
    events = events[(events["duration_us"] > 0) & (events["wire_bytes"] > 0)]
    keys = ["op", "axis", "group_size"]
    sums = events.groupby(keys, observed=True).agg(
        calls=("op", "size"), wire_bytes=("wire_bytes", "sum"), us=("duration_us", "sum"), ranks=("ranks", "first")
    )
    frame = sums.assign(gb_s=sums["wire_bytes"] / sums["us"] / 1e3).reset_index()
    name = run.env.get("stated", {}).get("cluster")
    links = [_link(ranks, name) for ranks in frame["ranks"]]
    frame["link"] = [link for link, _ in links]
    frame["share"] = [gb_s / rate if rate else math.nan for gb_s, (_, rate) in zip(frame["gb_s"], links, strict=True)]
    return frame.drop(columns=["us", "ranks"])


def _link(ranks: str, cluster: Any) -> tuple[str, float]:
    """The outermost link between these ranks, and what one of them sends through it: 1e9 bytes a second."""
    if not cluster or not ranks:
        return "", 0.0
    way = route([int(rank) for rank in ranks.split()], read(str(cluster)))
    return way.link, 1 / way.byte_s / 1e9 if way.byte_s else 0.0
