"""`shardproof compare`: two runs, or a baseline and a run, side by side; one run alone, its modes against each other.

Exit status: 0 every limit holds, 1 one is broken, 2 there is nothing to compare.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from shardproof.reports.comparing.compared_sides import check_name, parse_limits
from shardproof.reports.comparing.compared_tables import (
    describe_equal_times,
    events_table,
    times_table,
    traffic_change_table,
)
from shardproof.reports.comparing.comparison import Comparison, compare
from shardproof.reports.comparing.snapshot import Snapshot, read_side, save_snapshot, snapshot
from shardproof.reports.pages.comparison_page import render_comparison, render_comparison_comment
from shardproof.reports.printing.printable import Failure, annotate_failures
from shardproof.reports.printing.run_tables import modes_table, side_by_side
from shardproof.reports.printing.text import (
    append_step_summary,
    show_busy,
    show_message,
    show_note,
    show_table,
    show_words,
    write_report,
)
from shardproof.reports.stored.frames import load

_MOST_BREACHES = 3
"""The most breaches of one limit that are printed."""


def main(arguments: argparse.Namespace) -> int:
    """Compare, print, and store a baseline if one is named."""
    if arguments.values:
        from shardproof.reports.commands.parity import compare_values  # noqa: PLC0415  (the harness's checks)

        return compare_values(arguments)
    asked = parse_limits(arguments.fail)
    if arguments.save_baseline is not None:
        check_name(arguments.save_baseline)
    if arguments.new is None:
        return _snapshot_one(arguments)
    with show_busy("reading and comparing both runs", sys.stderr):
        base, new = (read_side(name, arguments.baselines) for name in (arguments.base, arguments.new))
        comparison = compare(base, new, asked)
    annotate_failures(_list_breaches(comparison), sys.stderr, os.environ)
    if arguments.json:
        print(json.dumps(_as_json(comparison), indent=2, allow_nan=False))
    elif arguments.output or arguments.markdown:
        _write_report(comparison, arguments)
    else:
        _print_comparison(comparison)
    if arguments.save_baseline:
        _save_baseline(new, arguments)
    return 1 if comparison.breaches else 0


def _list_breaches(comparison: Comparison) -> Iterator[Failure]:
    """What changed and the broken limits, as one failure at the first line of a changed event; none if all hold."""
    if comparison.breaches:
        at = comparison.lines[0].rpartition(", at ")[2].partition(", ")[0] if comparison.lines else ""
        message = "\n".join((*comparison.changes, *_shorten_breaches(comparison)))
        yield at, f"{comparison.new} beside {comparison.base}", message


def _write_report(comparison: Comparison, arguments: argparse.Namespace) -> None:
    """The page, or the comment on a pull request, in a file or printed. Raises RequestError if that is impossible."""
    text = render_comparison_comment(comparison) if arguments.markdown else render_comparison(comparison)
    write_report(text, arguments.output or "")


def _snapshot_one(arguments: argparse.Namespace) -> int:
    run = load(arguments.base)
    if arguments.save_baseline:
        _save_baseline(snapshot(run, arguments.base), arguments)
        return 0
    for note in run.notes:
        show_note(note, sys.stdout)
    show_table(modes_table(side_by_side(run)), sys.stdout)
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
        show_words(f"exceeds --fail {breach}", sys.stdout, style="bold red")
    asked = ", ".join(map(str, comparison.asked))
    if not comparison.breaches:
        show_message(f"no limit is broken: {asked}", sys.stdout, style="green")


def _shorten_breaches(comparison: Comparison) -> Iterator[str]:
    """The breaches. If many events break one limit, only the first are listed, since the table has all."""
    by_limit: dict[str, list[str]] = {}
    for breach in comparison.breaches:
        by_limit.setdefault(breach.partition(": ")[0], []).append(breach)
    for limit, own in by_limit.items():
        yield from own[:_MOST_BREACHES]
        if len(own) > _MOST_BREACHES:
            yield f"{limit}: {len(own) - _MOST_BREACHES} more, which the table of events lists"


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
