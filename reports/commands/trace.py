"""`shardproof trace`: a run as JSON for ui.perfetto.dev and Chrome's about:tracing, one process for each rank.

`--kineto` writes a file for each rank, as the torch profiler does (reports.commands.kineto_files). A process has the
track "program", in which cases, steps, micro-batches and phases are nested, and one track for each stream of calls.
Calls that are waited for at once share "calls <axis>", asynchronous ones have "async <axis>". Overlapping calls of a
stream get a second lane, since slices of a track must not cross. A rank of a pipeline on real processes also has a
track "stage": its forwards and backwards, and its waiting between them. There an asynchronous call lasts until its rank
waits for it, so that overlap is visible. Counters add up the bytes sent by axis. Cases follow each other in the order
of the run. Times are microseconds, as the format demands.
"""

import argparse
import gzip
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import pandas as pd

from shardproof.harness.errors import guard_file
from shardproof.reports.commands.kineto_files import add_durations, write_kineto
from shardproof.reports.printing.text import show_message, show_note
from shardproof.reports.stored.frames import Run, load

_PAUSE_US = 1000.0
"""The gap between two cases."""
_PROGRAM = 0
_COLUMNS = ("case", "step", "microbatch", "phase", "region", "op", "reduce_op", "axis", "group_size", "dtype", "shape")
_MORE_COLUMNS = ("payload_bytes", "wire_bytes", "is_async", "call_index", "caller")
_SPAN = ["kind", "micro", "chunk", "start_us", "end_us"]
Slice = dict[str, Any]


def main(arguments: argparse.Namespace) -> int:
    """Write the trace of a run and print where it is. Raises RequestError if it cannot be written."""
    run = load(arguments.run)
    usual, readers = ("kineto", "HTA and TraceLens") if arguments.kineto else ("trace.json", "ui.perfetto.dev")
    target = Path(arguments.output) if arguments.output else run.path / usual
    notes = list(run.notes)
    with guard_file(f"-o {target}", f"-o {usual}"):
        if arguments.kineto:
            notes += write_kineto(run, target)
        else:
            write_trace(run, target)
    for note in notes:
        show_note(note, sys.stderr)
    show_message(f"{target}  (opens in {readers})", sys.stdout)
    return 0


def write_trace(run: Run, path: Path) -> Path:
    """Write the trace of this run, compressed if the name ends in .gz, and return its path."""
    with cast(TextIO, gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w", encoding="utf-8")) as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        file.write(json.dumps({"run": run.path.resolve().name, "notes": list(run.notes), "env": run.env}))
        file.write(', "traceEvents": [')
        for number, event in enumerate(trace_events(run)):
            file.write(("," if number else "") + "\n" + json.dumps(event, default=lambda _unknown: None))
        file.write("\n]}\n")
    return path


def trace_events(run: Run) -> Iterator[Slice]:
    """The entries of the trace, rank by rank: its name, its slices, the names of its tracks, its counters."""
    text = dict.fromkeys(("mode", "phase", "op", "axis"), "str")
    ledger, spans = _in_a_row(run.ledger.astype(text), run.spans)
    for rank, events in ledger.groupby("rank", sort=True):
        pid = int(str(rank))
        yield describe_track("process_name", pid, _PROGRAM, name=f"rank {pid}")
        yield describe_track("process_sort_index", pid, _PROGRAM, sort_index=pid)
        yield describe_track("thread_name", pid, _PROGRAM, name="program")
        ordered = events.sort_values(["case_start_us", "call_index"], kind="stable")
        yield from _program_slices(ordered, pid)
        tracks: dict[str, int] = {}
        yield from _computation_slices(spans[spans["rank"] == rank], pid, tracks)
        yield from _call_slices(ordered, pid, tracks)
        for name, tid in tracks.items():
            yield describe_track("thread_name", pid, tid, name=name)
        yield from _counter_slices(ordered, pid)


def _in_a_row(ledger: pd.DataFrame, spans: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Ledger and spans with the cases one after another: times over the whole run, case_start_us in the ledger.

    An asynchronous call of unknown duration lasts as long as its span.
    """
    ledger = add_durations(ledger, spans)
    computed = spans[spans["call_index"] < 0]
    timed = (ledger.assign(end_us=ledger["start_us"] + ledger["duration_us"]), computed)
    ends = pd.concat([rows[["case", "start_us", "end_us"]] for rows in timed])
    cases = ends.groupby("case", sort=False).agg(first=("start_us", "min"), last=("end_us", "max"))
    length = cases["last"] - cases["first"] + _PAUSE_US
    offset = length.cumsum().shift(fill_value=0.0) - cases["first"]
    at = ledger["case"].map(offset).astype("float64")
    moved = computed["case"].map(offset).astype("float64")
    return (
        ledger.assign(start_us=ledger["start_us"] + at, case_start_us=at + ledger["case"].map(cases["first"])),
        computed.assign(start_us=computed["start_us"] + moved, end_us=computed["end_us"] + moved),
    )


def describe_track(what: str, pid: int, tid: int, **args: Any) -> Slice:
    """An entry that describes a process or a track."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _make_slice(pid: int, tid: int, name: str, category: str, start_us: float, end_us: float, **args: Any) -> Slice:
    start, end = round(start_us, 3), round(max(start_us, end_us), 3)
    whole = {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": category}
    return whole | {"ts": start, "dur": round(end - start, 3), "args": args}


def _program_slices(events: pd.DataFrame, pid: int) -> Iterator[Slice]:
    """Cases, steps, micro-batches and phases. Each lasts until the next one of its kind, or what it is in, ends it."""
    levels = ("case", "step", "microbatch", "phase")
    words = {"case": "{}", "step": "step {}", "microbatch": "micro-batch {}", "phase": "{}"}
    for _, of_case in events.groupby("case", sort=False):
        start_us = of_case["start_us"].cummax()
        last_us = float((of_case["start_us"] + of_case["duration_us"]).max())
        begins = pd.Series(False, index=of_case.index)
        for level in levels:
            begins |= of_case[level].ne(of_case[level].shift())
            starts = [float(start) for start in start_us[begins]]
            names = [words[level].format(value) for value in of_case.loc[begins, level]]
            for name, start, end in zip(names, starts, [*starts[1:], last_us], strict=True):
                yield _make_slice(pid, _PROGRAM, name, level, start, end)


def _computation_slices(spans: pd.DataFrame, pid: int, tracks: dict[str, int]) -> Iterator[Slice]:
    """Forwards and backwards, and the time between those of a step, in which the rank waits."""
    for _, of_step in spans.sort_values("start_us", kind="stable").groupby(["case", "step"], sort=False):
        tid = tracks.setdefault("stage", len(tracks) + 1)
        ended_us = math.inf
        for kind, micro, chunk, start_us, end_us in of_step[_SPAN].itertuples(index=False, name=None):
            if start_us > ended_us:
                yield _make_slice(pid, tid, "waits", "stage", ended_us, start_us)
            name = f"{'forward' if kind == 'F' else 'backward'} {micro}"
            yield _make_slice(pid, tid, name, "stage", start_us, end_us, micro=micro, chunk=chunk)
            ended_us = end_us


def _call_slices(events: pd.DataFrame, pid: int, tracks: dict[str, int]) -> Iterator[Slice]:
    """Every event as a slice; adds the names of its tracks to `tracks`."""
    free_us: dict[str, float] = {}
    names = [*_COLUMNS, *_MORE_COLUMNS, "start_us", "duration_us"]
    for row in events.sort_values("start_us", kind="stable")[names].itertuples(index=False, name=None):
        event = dict(zip(names, row, strict=True))
        start_us, spent_us = event.pop("start_us"), max(0.0, event.pop("duration_us"))
        stream = f"{'async' if event['is_async'] else 'calls'} {event['axis']}"
        lane = 1
        while free_us.get(track := stream if lane == 1 else f"{stream} ({lane})", start_us) > start_us:
            lane += 1
        # Rounded as it is written, since a slice must not begin before the end of the one before it.
        free_us[track] = round(start_us + spent_us, 3) + 0.001
        tid = tracks.setdefault(track, len(tracks) + 1)
        name = f"{event['op']} {event['region']}".strip()
        yield _make_slice(pid, tid, name, event["phase"], start_us, start_us + spent_us, **event)


def _counter_slices(events: pd.DataFrame, pid: int) -> Iterator[Slice]:
    for axis, calls in events.sort_values("start_us", kind="stable").groupby("axis", sort=True):
        sent = calls["wire_bytes"].fillna(0).cumsum()
        name = f"bytes sent over {axis}"
        for start_us, total in zip(calls["start_us"], sent, strict=True):
            yield {"ph": "C", "pid": pid, "name": name, "ts": round(float(start_us), 3), "args": {"bytes": int(total)}}
