"""Snapshot of a run for comparisons, small enough to keep: events counted, times by phase and module, memory.

Events that are equal in everything but rank, step and micro-batch are one row. They were issued `calls` times in each
of `ranks` x `steps` x `microbatches` ("0..3", "0,2"). No row is lost: rows of two snapshots are equal if and only if
the multisets of events are. Times are microseconds, means over ranks, one row for each module in each micro-batch.

A baseline is a snapshot kept as text, to be stored beside the code and read in a pull request. Its folder
`<folder>/<name>/` has baseline.json (where from, versions, machine), cases.csv, events.csv, times.csv, memory.csv, and
of a recorded program callers.csv. events.csv is sorted and without times: equal ledgers give equal files.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from shardproof.harness.errors import RequestError, guard_file
from shardproof.reports.comparing.compared_sides import FOLDER, MARK, check_name, is_trace, side_folder
from shardproof.reports.stored.files import RunFolderError, is_recording, json_object, shorten_path
from shardproof.reports.stored.frames import Run, csv_table, load

_PLACE = ("case", "mode", "phase", "region", "op")
WHAT = ("axis", "group_size", "reduce_op", "dtype", "shape", "payload_bytes", "is_async")
"""Columns that identify an event at a place."""
CALLED = ("phase", "region", "op", "axis")
"""Columns by which the lines of a recorded program are stored."""
_CELLS = ("step", "microbatch", "rank")
_TEXT = (*_PLACE, "axis", "reduce_op", "dtype", "shape", "ranks", "steps", "microbatches")
_EVENT_COLUMNS = (*_PLACE, *WHAT, "calls", "ranks", "steps", "microbatches")
_PACKED = dict.fromkeys((*_PLACE, "axis", "reduce_op", "dtype", "shape"), "category")
EVENT_TYPES = {name: "str" if name in _TEXT else "int64" for name in _EVENT_COLUMNS} | {"is_async": "bool"}
TIME_TYPES = (
    dict.fromkeys(("case", "mode", "phase", "region"), "str")
    | dict.fromkeys(("step", "microbatch"), "int64")
    | dict.fromkeys(("elapsed_us", "in_calls_us"), "float64")
)
MEMORY_TYPES = {"case": "str", "rank": "int64", "saved_bytes": "int64"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A side of a comparison.

    name     where it comes from, as the user wrote it
    cases    case, mode, world_size
    events   case, mode, phase, region, op, axis, group_size, reduce_op, dtype, shape, payload_bytes, is_async, calls,
             ranks, steps, microbatches
    times    case, mode, phase, region, step, microbatch, elapsed_us (from the end of the rank's call before to the end
             of this one), in_calls_us (inside the calls)
    memory   case, rank, saved_bytes
    cut      why the run may lack events: it was cut off
    callers  of a recorded program: (phase, region, op, axis) -> the lines that issue such calls; else empty
    """

    name: str
    cases: pd.DataFrame
    events: pd.DataFrame
    times: pd.DataFrame
    memory: pd.DataFrame
    env: dict[str, Any]
    notes: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    callers: Mapping[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)


def snapshot(run: Run, name: str = "") -> Snapshot:
    """The snapshot of a run."""
    # Texts are numbered, so that a million rows are grouped in seconds.
    traced = "source" in run.env
    ledger = _from_its_first_step(run.ledger) if traced else run.ledger
    plain = ledger.astype(dict.fromkeys(("mode", "phase", "op", "axis"), "str")).astype(_PACKED)
    return Snapshot(
        name=name or str(run.path),
        cases=run.cases[["case", "mode", "world_size"]].astype({"case": "str", "mode": "str"}),
        events=count_events(plain),
        times=time_by_module(plain[:0] if traced else plain),  # a trace has times of calls on the device alone
        memory=run.memory.astype(MEMORY_TYPES),
        env=run.env,
        notes=run.notes,
        cut=run.cut,
        callers=called_from(run.ledger) if is_recording(run.path) else {},
    )


def _from_its_first_step(ledger: pd.DataFrame) -> pd.DataFrame:
    """The ledger of traces with steps counted from 0, whichever the profiler saw first, and -1 for unknown bytes."""
    steps = ledger["step"]
    first = steps[steps >= 0].min() if (steps >= 0).any() else 0
    payload = ledger["payload_bytes"].fillna(-1).astype("int64")
    return ledger.assign(step=(steps - first).where(steps >= 0, -1), payload_bytes=payload)


def called_from(ledger: pd.DataFrame) -> dict[tuple[str, ...], tuple[str, ...]]:
    """(phase, region, op, axis) -> the lines of the program that issue such calls, in alphabetical order."""
    columns = [*CALLED, "caller"]
    rows = ledger[columns].astype("str").drop_duplicates().sort_values(columns)
    found: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for *place, caller in rows.itertuples(index=False, name=None):
        found[tuple(place)] += [caller] if caller else []
    return {place: tuple(callers) for place, callers in found.items()}


def count_events(ledger: pd.DataFrame) -> pd.DataFrame:
    """The ledger as counts of equal events, in a fixed order, so that equal ledgers give equal files."""
    kinds = ledger.groupby([*_PLACE, *WHAT], observed=True, sort=True)
    number = kinds.ngroup().rename("kind")
    cells = ledger[list(_CELLS)].assign(kind=number).groupby(["kind", *_CELLS], sort=False).size()
    rows = cells.rename("calls").reset_index()[["kind", "step", "microbatch", "calls", "rank"]]
    by_rank = _fold_rows((row[:4], row[4]) for row in rows.itertuples(index=False, name=None))
    by_micro = _fold_rows(((kind, step, calls, ranks), micro) for (kind, step, micro, calls), ranks in by_rank)
    by_step = _fold_rows(((kind, calls, ranks, micros), step) for (kind, step, calls, ranks), micros in by_micro)
    folded = [(*key, steps) for key, steps in by_step]
    frame = pd.DataFrame(folded, columns=["kind", "calls", "ranks", "microbatches", "steps"])
    what = kinds.size().index.to_frame(index=False)
    frame = frame.join(what, on="kind").sort_values(["kind", "steps", "microbatches", "ranks"])
    return frame[list(_EVENT_COLUMNS)].astype(EVENT_TYPES).reset_index(drop=True)


def _fold_rows(rows: Iterable[tuple[Hashable, int]]) -> Iterator[tuple[Any, str]]:
    """Rows that differ only in their last number, joined to one row with all of these numbers as text."""
    found: defaultdict[Hashable, list[int]] = defaultdict(list)
    for key, number in rows:
        found[key].append(number)
    texts: dict[tuple[int, ...], str] = {}
    for key, numbers in found.items():
        these = tuple(sorted(numbers))
        if these not in texts:
            texts[these] = format_span(these)
        yield key, texts[these]


def format_span(numbers: Iterable[int]) -> str:
    """Whole numbers as text: "0..3", "0,2", "0..1,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs)


def parse_span(text: str) -> list[int]:
    """The numbers that `format_span` wrote. Raises ValueError for anything else."""
    ends = [tuple(int(number) for number in part.split("..")) for part in text.split(",")]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


def time_by_module(ledger: pd.DataFrame) -> pd.DataFrame:
    """Time spent and time inside calls, by module and micro-batch, mean over ranks."""
    frame = ledger[["case", "mode", "phase", "region", *_CELLS, "world_size", "call_index", "duration_us"]]
    frame = frame.assign(end_us=ledger["start_us"] + ledger["duration_us"])
    frame = frame.sort_values(["case", "rank", "call_index"], kind="stable")
    before_us = frame.groupby(["case", "rank"], observed=True, sort=False)["end_us"].shift()
    # The time before a rank's first call is unknown, so only the call itself counts.
    elapsed_us = (frame["end_us"] - before_us).fillna(frame["duration_us"])
    shares = {"elapsed_us": elapsed_us / frame["world_size"], "in_calls_us": frame["duration_us"] / frame["world_size"]}
    keys = ["case", "mode", "phase", "region", "step", "microbatch"]
    sums = frame.assign(**shares).groupby(keys, observed=True, sort=True)[list(shares)].sum()
    return sums.round(3).reset_index().astype(TIME_TYPES)


_CALLERS = "callers.csv"
_CASE_TYPES = {"case": "str", "mode": "str", "world_size": "int64"}
_TABLES: Mapping[str, Mapping[str, str]] = {
    "cases": _CASE_TYPES,
    "events": EVENT_TYPES,
    "times": TIME_TYPES,
    "memory": MEMORY_TYPES,
}


def read_side(name: str, folder: str = FOLDER) -> Snapshot:
    """The snapshot of one side: a run folder, the folder of a baseline, a baseline's name, or a trace file.

    Raises RunFolderError if there is none, RequestError for a file without a trace.
    """
    if is_trace(name):
        return _of_trace(name)
    path = side_folder(name, folder)
    return _read_snapshot(path, name) if (path / MARK).is_file() else snapshot(load(path), name)


def _of_trace(name: str) -> Snapshot:
    from shardproof.harness.programs.traced import read_into_folder  # noqa: PLC0415  (torch, for traces alone)

    with tempfile.TemporaryDirectory() as folder:
        return snapshot(load(read_into_folder(name, Path(folder))), name)


def save_snapshot(kept: Snapshot, name: str, folder: str = FOLDER) -> Path:
    """Store a snapshot under this name, in place of an older one. Returns its folder.

    Raises RequestError for a run that was cut off or has no events, an illegal name, a folder that cannot be written.
    """
    check_name(name)
    if kept.cut:
        raise RequestError(f"run {kept.name}: was cut off ({kept.cut[0]}), so it is no baseline; legal: a whole run")
    if kept.cases.empty or kept.events.empty:
        raise RequestError(f"run {kept.name}: holds no event, so it is no baseline; legal: a run that communicated")
    path = Path(folder) / name
    with guard_file(f"baseline={shorten_path(path)}", "a writable folder"):
        if path.is_dir() and any(path.iterdir()) and not (path / MARK).is_file():
            raise RequestError(f"baseline={path}: the folder holds something else; legal: another name")
        path.mkdir(parents=True, exist_ok=True)
        (path / MARK).unlink(missing_ok=True)  # until all is written there is no baseline
        for table, types in _TABLES.items():
            frame: pd.DataFrame = getattr(kept, table)
            frame[list(types)].to_csv(path / f"{table}.csv", index=False, lineterminator="\n")
        if kept.callers:
            lines = pd.DataFrame([(*place, " ".join(callers)) for place, callers in kept.callers.items()])
            lines.to_csv(path / _CALLERS, index=False, header=[*CALLED, "callers"], lineterminator="\n")
        env = json.dumps({"from": kept.name, "env": kept.env}, indent=2, sort_keys=True)
        (path / MARK).write_text(env + "\n", encoding="utf-8")
    return path


def write_events(events: pd.DataFrame, path: Path) -> None:
    """Store the counted events, and nothing else of a snapshot."""
    path.parent.mkdir(parents=True, exist_ok=True)
    events[list(EVENT_TYPES)].to_csv(path, index=False, lineterminator="\n")


def read_events(path: Path) -> pd.DataFrame:
    """Counted events that `write_events` stored. Raises RunFolderError if the file is torn or another one."""
    return _read_table(path, EVENT_TYPES)


def _read_snapshot(path: Path, name: str) -> Snapshot:
    mark = json_object(path / MARK)
    env = mark.get("env")
    if not isinstance(env, dict):
        raise RunFolderError(f"{path / MARK}: needs the object `env`; write the baseline again with --save-baseline")
    cases, events, times, memory = (_read_table(path / f"{table}.csv", types) for table, types in _TABLES.items())
    callers = {}
    if (path / _CALLERS).is_file():
        lines = _read_table(path / _CALLERS, dict.fromkeys((*CALLED, "callers"), "str"))
        callers = {tuple(place): tuple(found.split()) for *place, found in lines.itertuples(index=False, name=None)}
    return Snapshot(name=name, env=env, cases=cases, events=events, times=times, memory=memory, callers=callers)


def _read_table(path: Path, types: Mapping[str, str]) -> pd.DataFrame:
    """A table that must be complete: a baseline is written once, so a cut one is damaged and proves nothing."""
    again = "write the baseline again with --save-baseline"
    if not path.is_file():
        raise RunFolderError(f"{path}: is missing; {again}")
    notes: list[str] = []
    frame = csv_table(path, dict(types), types, notes)
    if notes or not path.stat().st_size:
        raise RunFolderError(f"{path}: is cut; {again}")
    try:
        for name in ("ranks", "steps", "microbatches"):
            if name in frame:
                for text in frame[name].unique():
                    parse_span(text)
    except ValueError as problem:
        raise RunFolderError(f"{path}: {name} holds {text!r}, which names no numbers; {again}") from problem
    return frame
