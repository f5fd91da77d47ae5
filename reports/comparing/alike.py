"""Events of traces and of what they are compared with, in what both sides know.

A column that a trace does not know, and that the other side knows, is compared on neither side. Where the sides have
other ranks, events are compared without the rank: each as often as the rank that has most of it issued it.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from shardproof.reports.comparing.snapshot import count_events, format_span, parse_span

_UNKNOWN: Mapping[str, tuple[str, str | int]] = {
    "phase": ("phase", "?"),
    "region": ("module", "?"),
    "axis": ("group", "?"),
    "group_size": ("size of the group", -1),
    "reduce_op": ("reduce op", "?"),
    "dtype": ("dtype", "?"),
    "shape": ("shape", "?"),
    "payload_bytes": ("bytes", -1),
    "is_async": ("asynchrony", False),
    "step": ("step", -1),
    "microbatch": ("micro-batch", -1),
}
"""Columns -> what they are called, and the value of what is not known."""


def align_events(
    base_env: Mapping[str, Any], base: pd.DataFrame, new_env: Mapping[str, Any], new: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """Both tables of events as they can be compared, and sentences on what is left out; the same where no trace is."""
    if "source" not in base_env and "source" not in new_env:
        return base, new, []
    one, two = (_one_by_one(events) for events in (base, new))
    unknown = [{*env.get("unknown", {}).get("columns", {})} for env in (base_env, new_env)]
    left_out = [name for name in _UNKNOWN if (name in unknown[0]) != (name in unknown[1])]
    for name in left_out:
        one[name] = two[name] = _UNKNOWN[name][1]
    words = [_UNKNOWN[name][0] for name in left_out]
    notes = [f"not compared, since only one side knows them: {', '.join(words)}"] if words else []
    ranks = [format_span(set(events["rank"])) for events in (one, two)]
    if ranks[0] != ranks[1]:
        one, two = _of_one_rank(one), _of_one_rank(two)
        notes.append(
            f"the ranks are {ranks[0] or 'none'} and {ranks[1] or 'none'}, so events are compared without the rank: "
            "each as often as the rank that has most of it issued it"
        )
    return count_events(one), count_events(two), notes


def _one_by_one(events: pd.DataFrame) -> pd.DataFrame:
    """A row for every event, with `rank`, `step` and `microbatch`."""
    frame = events.rename(columns={"ranks": "rank", "steps": "step", "microbatches": "microbatch"})
    for name in ("rank", "step", "microbatch"):
        frame = frame.assign(**{name: frame[name].map(parse_span)}).explode(name, ignore_index=True)
        frame[name] = frame[name].astype("int64")
    return frame.loc[frame.index.repeat(frame["calls"])].drop(columns="calls").reset_index(drop=True)


def _of_one_rank(events: pd.DataFrame) -> pd.DataFrame:
    """The events that one rank would have issued, as often as the rank that has most of each."""
    kinds = [name for name in events.columns if name != "rank"]
    number = events.groupby([*kinds, "rank"], observed=True).cumcount()
    return events.assign(number=number, rank=0).drop_duplicates([*kinds, "number"]).drop(columns="number")
