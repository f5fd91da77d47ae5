"""`shardproof compare`: two runs, or a baseline and a run, side by side; one run alone, its modes against each other.

Exit status: 0 every limit holds, 1 one is broken, 2 there is nothing to compare.
"""

import argparse
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from shardproof.reports.comparing.compared_sides import check_name, parse_limits
from shardproof.reports.comparing.comparison import Comparison, compare
from shardproof.reports.comparing.intervals import CONFIDENCE, FEWEST
from shardproof.reports.comparing.snapshot import Snapshot, read_side, save_snapshot, snapshot
from shardproof.reports.printing.modes import modes_table, side_by_side
from shardproof.reports.printing.text import append_step_summary, show_message, show_note, show_table, show_words
from shardproof.reports.printing.text_tables import NOTHING, Table, byte_size, count, mark, milliseconds, pair, table
from shardproof.reports.stored.frames import load

_MOST_BREACHES = 3
"""Breaches of one limit that are printed."""


def main(arguments: argparse.Namespace) -> int:
    """Compare, print, and store a baseline where one is named."""
    asked = parse_limits(arguments.fail)
    if arguments.save_baseline is not None:
        check_name(arguments.save_baseline)
    if arguments.new is None:
        return _snapshot_one(arguments)
    base, new = (read_side(name, arguments.baselines) for name in (arguments.base, arguments.new))
    comparison = compare(base, new, asked)
    if arguments.json:
        print(json.dumps(_as_json(comparison), indent=2, allow_nan=False))
    else:
        _print_comparison(comparison)
    if arguments.save_baseline:
        _save_baseline(new, arguments)
    return 1 if comparison.breaches else 0


def _snapshot_one(arguments: argparse.Namespace) -> int:
    run = load(arguments.base)
    for note in run.notes:
        show_note(note, sys.stdout)
    show_table(modes_table(side_by_side(run)), sys.stdout)
    if arguments.save_baseline:
        _save_baseline(snapshot(run, arguments.base), arguments)
    return 0


def _save_baseline(kept: Snapshot, arguments: argparse.Namespace) -> None:
    path: Path = save_snapshot(kept, arguments.save_baseline, arguments.baselines)
    print(f"{path}  (a baseline; `shardproof compare {path.name} RUN` holds a run against it)", file=sys.stderr)


def _print_comparison(comparison: Comparison) -> None:
    for sentence in comparison.changes:
        show_words(sentence, sys.stdout, style="bold")
    for note in comparison.notes:
        show_note(note, sys.stdout)
    tables = [traffic_change_table(comparison)]
    tables += [events_table(comparison.folded)] if len(comparison.folded) else []
    for one in tables:
        show_table(one, sys.stdout)
        append_step_summary(one, f"{comparison.base} and {comparison.new}", os.environ)
    for line in comparison.lines:
        show_message(line, sys.stdout)
    if show_nothing := describe_equal_times(comparison.times):
        show_words(show_nothing, sys.stdout)
    else:
        show_table(times_table(comparison.times), sys.stdout)
    for breach in _shorten_breaches(comparison):
        show_words(f"breach: {breach}", sys.stdout, style="bold red")
    asked = ", ".join(map(str, comparison.asked))
    if not comparison.breaches:
        show_message(f"no limit is broken: {asked}", sys.stdout, style="green")


def _shorten_breaches(comparison: Comparison) -> Iterator[str]:
    """The breaches; of a limit that many events break the first ones, since the table has them all."""
    by_limit: dict[str, list[str]] = {}
    for breach in comparison.breaches:
        by_limit.setdefault(breach.partition(": ")[0], []).append(breach)
    for limit, own in by_limit.items():
        yield from own[:_MOST_BREACHES]
        if len(own) > _MOST_BREACHES:
            yield f"{limit}: {len(own) - _MOST_BREACHES} more, which the table of events lists"


def traffic_change_table(comparison: Comparison) -> Table:
    """Calls and bytes of both sides, by mode and phase."""
    kinds: dict[object, Counter[str]] = {}
    for mode, phase, kind in comparison.folded[["mode", "phase", "kind"]].itertuples(index=False):
        kinds.setdefault((mode, phase), Counter())[kind] += 1
    places = zip(comparison.traffic["mode"], comparison.traffic["phase"], strict=True)
    apart = [", ".join(f"{number} {kind}" for kind, number in kinds.get(place, {}).items()) for place in places]
    return table(
        f"{comparison.base} and {comparison.new}",
        comparison.traffic.assign(apart=apart),
        (str, "mode | phase"),
        (count, "calls | now: new_calls"),
        (byte_size, "payload: payload_bytes | now: new_payload_bytes"),
        (lambda word: str(word) or "same", "events: apart"),
        note="one rank, all cases of a mode added up",
    )


def events_table(folded: pd.DataFrame) -> Table:
    """Every event that is new, gone, changed or moved, all layers in one row; from `fold_changes`.

    Ranks, steps and micro-batches that all rows share stand in the note.
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


def _shorten_event(row: Mapping[str, Any]) -> str:
    """The words of an event without its size, which the table adds up."""
    return re.sub(r", [\d,]+ bytes\b", "", row["what"])


def _text_of_growth(old: int, now: int, write: Callable[[object], str]) -> str:
    if old == now:
        return write(now)
    return f"+{write(now)}" if not old else f"-{write(old)}" if not now else f"{write(old)} -> {write(now)}"


def describe_equal_times(times: pd.DataFrame) -> str:
    """A sentence where times show nothing; "" where a phase is slower or faster."""
    if times["change"].isin(["slower", "faster"]).any():
        return ""
    judged = times[times["change"] != "too few"]
    if judged.empty:
        return f"times show nothing: no phase has the {FEWEST} micro-batches on both sides that an interval needs"
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


def _as_json(comparison: Comparison) -> dict[str, object]:
    frames = {name: getattr(comparison, name) for name in ("traffic", "events", "times", "memory")}
    return {
        "base": comparison.base,
        "new": comparison.new,
        "changes": list(comparison.changes),
        "limits": [str(limit) for limit in comparison.asked],
        "breaches": list(comparison.breaches),
        "notes": list(comparison.notes),
    } | {name: json.loads(frame.to_json(orient="records")) for name, frame in frames.items()}
