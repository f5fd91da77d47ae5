"""The pipelines of a run on real processes: their last step rank by rank, and how much of it the ranks waited.

A run whose ranks took turns has none: there, nothing computes while something else does. Times are microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from reports.stored.frames import Run

_COMPUTED = ("F", "B")


def cores(run: Run) -> str:
    """How many cores the machine of the run had."""
    return str(run.env.get("machine", {}).get("cores") or "an unknown number of")


def last_steps(run: Run) -> dict[str, pd.DataFrame]:
    """Case -> the spans of its last step (Run.spans), by rank and start."""
    spans = run.spans
    last = spans[spans["step"] == spans.groupby("case")["step"].transform("max")]
    ordered = last.sort_values(["rank", "start_us"], kind="stable")
    return {str(case): own.reset_index(drop=True) for case, own in ordered.groupby("case", sort=False)}


def measured(run: Run) -> pd.DataFrame:
    """A row for every pipeline: case, ranks, step, step_us, bubble, bubble_stated, calls_us, overlapped_us.

    step_us is from the first forward to the last backward, `bubble` the share of all ranks' time in it in which they
    compute nothing, `bubble_stated` its closed form (missing: none is known). calls_us is how long asynchronous calls
    were under way until their ranks waited for them, overlapped_us the part of it in which the rank computed.
    """
    stated = pd.to_numeric(run.cases.set_index("case").reindex(columns=["bubble_stated"])["bubble_stated"])
    rows = []
    for case, spans in last_steps(run).items():
        computed = spans[spans["kind"].isin(_COMPUTED)]
        whole_us = float(computed["end_us"].max() - computed["start_us"].min())
        ranks = computed["rank"].nunique()
        calls = spans[~spans["kind"].isin(_COMPUTED)]
        rows.append(
            {
                "case": case,
                "ranks": ranks,
                "step": int(spans["step"].iloc[0]),
                "step_us": whole_us,
                "bubble": 1 - float((computed["end_us"] - computed["start_us"]).sum()) / (ranks * whole_us),
                "bubble_stated": float(stated.get(case, math.nan)),
                "calls_us": float((calls["end_us"] - calls["start_us"]).sum()),
                "overlapped_us": overlapped_us(spans),
            }
        )
    columns = ("case", "ranks", "step", "step_us", "bubble", "bubble_stated", "calls_us", "overlapped_us")
    return pd.DataFrame(rows, columns=list(columns))


def overlapped_us(spans: pd.DataFrame) -> float:
    """For how long calls of these spans were under way while their own rank computed, all calls added up."""
    found = 0.0
    for _, own in spans.groupby("rank"):
        computed = own[own["kind"].isin(_COMPUTED)]
        found += sum(
            _common_us(call, computed["start_us"].tolist(), computed["end_us"].tolist())
            for call in own[~own["kind"].isin(_COMPUTED)][["start_us", "end_us"]].itertuples(index=False, name=None)
        )
    return found


def _common_us(call: tuple[float, float], starts: Sequence[float], ends: Sequence[float]) -> float:
    return sum(max(0.0, min(call[1], end) - max(call[0], start)) for start, end in zip(starts, ends, strict=True))
