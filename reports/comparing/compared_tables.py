"""Tables of a comparison of two runs: calls and bytes, events that differ, times."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from shardproof.reports.comparing.comparison import Comparison
from shardproof.reports.comparing.intervals import CONFIDENCE, FEWEST
from shardproof.reports.printing.text_tables import NOTHING, Table, byte_size, count, mark, milliseconds, pair, table


def traffic_change_table(comparison: Comparison) -> Table:
    """Calls and bytes of both sides, by mode and phase."""
    kinds: dict[object, Counter[str]] = {}
    for mode, phase, kind in comparison.folded[["mode", "phase", "kind"]].itertuples(index=False):
        kinds.setdefault((mode, phase), Counter())[kind] += 1
    places = zip(comparison.traffic["mode"], comparison.traffic["phase"], strict=True)
    apart = [
        ", ".join(f"{number} {kind}" for kind, number in kinds.get(place, {}).items()) or "same" for place in places
    ]
    return table(
        f"{comparison.base} and {comparison.new}",
        comparison.traffic.assign(apart=apart),
        (str, "mode | phase"),
        (count, "calls | now: new_calls"),
        (byte_size, "payload: payload_bytes | now: new_payload_bytes"),
        (str, "events: apart"),
        note="one rank, all cases of a mode added up",
    )


def events_table(folded: pd.DataFrame) -> Table:
    """Every event that is new, gone, changed or moved, with all layers in one row; from `fold_changes`.

    Ranks, steps and micro-batches that all rows have in common are in the note.
    """
    several = folded["mode"].nunique() > 1
    spans = {"ranks": "ranks", "steps": "steps", "microbatches": "micro-batches"}
    shared = [name for name in spans if folded[name].nunique() == 1]
    where = ", ".join(f"{spans[name]} {folded[name].iloc[0]}" for name in shared)
    rows = folded.to_dict("records")
    return table(
        "Events that differ",
        folded.assign(
            module=[f"{row['region']} x {row['modules']}" if row["modules"] > 1 else row["region"] for row in rows],
            event=[f"{row['op']}: {row['what']}" if row["kind"] == "changed" else _shorten_event(row) for row in rows],
            more_calls=[_text_of_growth(row["base_calls"], row["new_calls"], count) for row in rows],
            more_bytes=[
                _text_of_growth(row["base_payload_bytes"], row["new_payload_bytes"], byte_size) for row in rows
            ],
        ),
        (str, ": kind | mode | phase" if several else ": kind | phase"),
        (mark, "module"),
        (str, "event | axis"),
        (pair, "calls: more_calls | bytes: more_bytes"),
        (count, "cases" if (folded["cases"] > 1).any() else ""),
        (str, " | ".join(f"{spans[name]}: {name}" for name in spans if name not in shared)),
        note="calls and bytes of these events on the rank that has most of them, layers and cases added up: how many "
        f"more (+) or fewer (-), or in the base -> now{f'; all of them in {where}' if where else ''}",
    )


def _shorten_event(row: Mapping[Any, Any]) -> str:
    """The words of an event without its size, which the table adds up."""
    return re.sub(r", [\d,]+ bytes\b", "", str(row["what"]))


def _text_of_growth(old: int, now: int, write: Callable[[object], str]) -> str:
    if old == now:
        return write(now)
    return f"+{write(now)}" if not old else f"-{write(old)}" if not now else f"{write(old)} -> {write(now)}"


def describe_equal_times(times: pd.DataFrame) -> str:
    """A sentence if times show nothing; "" if a phase is slower or faster."""
    if times["change"].isin(["slower", "faster"]).any():
        return ""
    judged = times[times["change"] != "too few"]
    if judged.empty:
        return f"times were not compared: no phase has {FEWEST} micro-batches or more on both sides"
    return (
        f"times show nothing: no phase is slower or faster beyond chance ({CONFIDENCE:.1%}) "
        f"in {count(judged['blocks'].max())} micro-batches"
    )


def times_table(times: pd.DataFrame) -> Table:
    """How the time of every phase changed."""
    typical = times[times["measure"] == "elapsed"] if (times["measure"] == "elapsed").any() else times
    louder = times[(times["measure"] != "elapsed") & ~times["change"].isin(["~", "too few"])]
    rows = pd.concat([typical, louder]).sort_values(["mode", "phase"], kind="stable")
    frame = rows.assign(
        interval=[
            f"{_text_of_ratio(low)} .. {_text_of_ratio(high)}"
            for low, high in zip(rows["low"], rows["high"], strict=True)
        ],
        clock=rows["clock_ratio"].map(_text_of_ratio),
        beside_other=rows["ratio"].map(_text_of_ratio),
    )
    return table(
        "Time of a micro-batch",
        frame,
        (str, "mode | phase | measure"),
        (count, "micro-batches: blocks"),
        (milliseconds, "ms: base_us | now: new_us"),
        (pair, "by the clock: clock"),
        (mark, "beside"),
        (pair, "ratio: beside_other | interval"),
        (str, ": change"),
        (mark, "mostly in: mostly"),
        note=f"medians; ratio: beside another phase of the same micro-batches, so that a busy machine is no change; "
        f"interval: {CONFIDENCE:.1%}; ~: no significant difference; too few: under {FEWEST} micro-batches",
    )


def _text_of_ratio(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.2f}"
