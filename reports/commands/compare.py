"""`shardproof compare`: two runs, or a baseline and a run, side by side; one run alone, its modes against each other.

Exit status: 0 every limit holds, 1 one is broken, 2 there is nothing to compare.
"""

import argparse
import json
import math
import os
import sys
from collections import Counter
from pathlib import Path

import pandas as pd

from shardproof.reports.comparing.compared_sides import check_name, parse_limits
from shardproof.reports.comparing.comparison import Comparison, compare
from shardproof.reports.comparing.intervals import CONFIDENCE, FEWEST
from shardproof.reports.comparing.snapshot import Snapshot, read_side, save_snapshot, snapshot
from shardproof.reports.printing.modes import modes_table, side_by_side
from shardproof.reports.printing.text import append_step_summary, show_message, show_note, show_table, show_words
from shardproof.reports.printing.text_tables import NOTHING, Table, count, mark, mebibytes, milliseconds, pair, table
from shardproof.reports.stored.frames import load


def main(arguments: argparse.Namespace) -> int:
    """Compare, print, and store a baseline where one is named."""
    if arguments.values:
        from shardproof.reports.commands.parity import compare_values  # noqa: PLC0415  (the harness's checks)

        return compare_values(arguments)
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
    for note in comparison.notes:
        show_note(note, sys.stdout)
    tables = [traffic_change_table(comparison)]
    tables += [events_table(comparison.events)] if len(comparison.events) else []
    tables += [times_table(comparison.times)] if len(comparison.times) else []
    for one in tables:
        show_table(one, sys.stdout)
        append_step_summary(one, f"{comparison.base} and {comparison.new}", os.environ)
    for line in comparison.lines:
        show_message(line, sys.stdout)
    for breach in comparison.breaches:
        show_words(f"breach: {breach}", sys.stdout, style="bold red")
    asked = ", ".join(map(str, comparison.asked))
    if not comparison.breaches:
        show_message(f"no limit is broken: {asked}", sys.stdout, style="green")


def traffic_change_table(comparison: Comparison) -> Table:
    """Calls and bytes of both sides, by mode and phase."""
    kinds: dict[object, Counter[str]] = {}
    for mode, phase, kind in comparison.events[["mode", "phase", "kind"]].itertuples(index=False):
        kinds.setdefault((mode, phase), Counter())[kind] += 1
    places = zip(comparison.traffic["mode"], comparison.traffic["phase"], strict=True)
    apart = [", ".join(f"{number} {kind}" for kind, number in kinds.get(place, {}).items()) for place in places]
    return table(
        f"{comparison.base} and {comparison.new}",
        comparison.traffic.assign(apart=apart),
        (str, "mode | phase"),
        (count, "calls | now: new_calls"),
        (mebibytes, "MiB: payload_bytes | now: new_payload_bytes"),
        (lambda word: str(word) or "same", "events: apart"),
        note="one rank, all cases of a mode added up",
    )


def events_table(events: pd.DataFrame) -> Table:
    """Every event that is new, gone or changed."""
    frame = events.assign(both_calls=_pair_texts(events, "calls"), both_bytes=_pair_texts(events, "payload_bytes"))
    return table(
        "Events that differ",
        frame,
        (str, ": kind | mode | phase"),
        (mark, "module: region"),
        (str, "op | axis | what"),
        (pair, "calls: both_calls | bytes: both_bytes"),
        (str, "ranks | steps | micro-batches: microbatches | case"),
        note="calls and bytes: of these events on the rank that has most of them, in the base -> now",
    )


def _pair_texts(frame: pd.DataFrame, column: str) -> list[str]:
    both = zip(frame[f"base_{column}"], frame[f"new_{column}"], strict=True)
    return [f"{count(old)} -> {count(now)}" for old, now in both]


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
        "limits": [str(limit) for limit in comparison.asked],
        "breaches": list(comparison.breaches),
        "notes": list(comparison.notes),
    } | {name: json.loads(frame.to_json(orient="records")) for name, frame in frames.items()}
