"""A run folder as pandas frames: `load("runs/latest").ledger` is all that a notebook needs.

Reads what `harness` writes and nothing else, and never writes. Every frame is flat; text columns with a natural order
(mode, phase, op, axis) are ordered categoricals, so that every table sorts alike. Units are in the column names: bytes,
microseconds. A folder that a killed run left behind loads too. A line cut in its middle is dropped, a missing summary
is made from the ledger, and `Run.notes` names both. A broken file raises RunFolderError.
"""

import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from shardproof.harness.dense_model import dense_model
from shardproof.harness.errors import name_ranks
from shardproof.harness.ledger import COLUMNS, OPS, PHASES, Event
from shardproof.harness.mesh_axes import SHOWN
from shardproof.harness.verdicts.facts import When, state_text
from shardproof.harness.verdicts.verdict import UNKNOWN, Verdict, record_of, verdict_of
from shardproof.harness.verdicts.words import notes_text
from shardproof.reports.stored.files import (
    RunFolderError,
    doubts_of,
    environment_of,
    is_recording,
    json_lines,
    note_unfinished_ranks,
    part_folders,
    run_folder,
    unknown_of,
    whole_lines,
)


def csv_table(path: Path, types: dict[str, str], needed: Iterable[str], notes: list[str]) -> pd.DataFrame:
    """The rows of a CSV file, none if it is empty. `types` by column; "str" for one that may hold anything.

    What a cut leaves whole is read, with a note. Raises RunFolderError if a column is missing or a value is wrong.
    """
    data = whole_lines(path, notes)
    header = data.split(b"\n", 1)[0].decode("utf-8").rstrip("\r").split(",")
    if not data:
        return pd.DataFrame({name: pd.Series(dtype=types[name]) for name in needed})
    if missing := [name for name in needed if name not in header]:
        raise RunFolderError(f"{path}: the column {missing[0]} is missing; it needs {','.join(needed)}")
    nullable = ("Int64", "Float64", "boolean")
    absent = {name: [""] for name in header if types.get(name) in nullable or not types}
    try:
        return pd.read_csv(
            io.BytesIO(data),
            dtype={name: kind for name, kind in types.items() if name in header},
            keep_default_na=False,
            na_values=absent,
        )
    except (ValueError, OverflowError) as error:
        raise RunFolderError(f"{path}: not the table it should be ({' '.join(str(error).split())})") from error


def join_ranks(run: Path, name: str, types: Mapping[str, str], notes: list[str]) -> pd.DataFrame:
    """A table of all ranks, with the column `rank`. Raises RunFolderError for a table that no recorder wrote."""
    frames, cut = [], []
    for rank, path in part_folders(run).items():
        if not (path / name).is_file():
            continue
        mended: list[str] = []
        frame = csv_table(path / name, dict(types), types, mended)
        cut += [rank] if mended else []
        frames.append(frame if "rank" in types else frame.assign(rank=rank))
    if cut:
        notes.append(f"{name} of {name_ranks(cut)}: the last line is cut and left out: {len(cut)} in all")
    if frames := [frame for frame in frames if len(frame)]:
        return pd.concat(frames, ignore_index=True)
    return pd.DataFrame({column: pd.Series(dtype=kind) for column, kind in {**types, "rank": "int64"}.items()})


LAYER_NUMBER = r"(?<=\.)\d+(?=\.|$)"
"""The number of a layer in the path of a module, as a regular expression."""
MOST_RANKS = 2**20
"""The largest world that a run may have."""
_ORDER = {"phase": PHASES, "op": OPS, "axis": SHOWN}

_KEYS = ("case", "mode", "phase", "op", "axis", "group_size")
_COUNTS = ("calls", "payload_bytes", "wire_bytes")
_EXPECTED = ("expected_calls", "expected_payload_bytes")
_BY_RANK = (*(f"min_{name}" for name in _COUNTS), "ranks_apart")
SUMMARY_COLUMNS = (*_KEYS, *_COUNTS, *_EXPECTED, *_BY_RANK)
_SUMMARY_TYPES = (
    dict.fromkeys(_KEYS[:-1], "str")
    | dict.fromkeys(("group_size", *_COUNTS), "int64")
    | dict.fromkeys((*_EXPECTED, *_BY_RANK), "Int64")
)
_VERDICT_TYPES = (
    dict.fromkeys(("case", "check", "verdict", "worst_name"), "str")
    | dict.fromkeys(("worst_error", "worst_allowed", "worst_epsilons"), "float64")
    | dict.fromkeys(("message", "unchecked"), "str")
)
_MEMORY_TYPES = {"case": "str", "rank": "int64", "saved_bytes": "int64"}
_NUMBERS = ("micro", "chunk", "start_us", "end_us", "call_index")
_SPAN_TYPES = {"case": "str", "rank": "int64", "step": "int64", "kind": "str"} | {
    name: "float64" if name.endswith("_us") else "int64" for name in _NUMBERS
}
_TYPES: dict[object, str] = {int: "int64", float: "float64", bool: "bool", str: "str"}
_LEDGER_TYPES = {name: _TYPES[Event.__annotations__[name]] for name in COLUMNS}
_SETTLED = ("step", "microbatch", "group_size")
"""Numbers that tell events apart: -1 where a trace does not know them."""
_NULLABLE = {"int64": "Int64", "float64": "Float64", "bool": "boolean"}
_TRACED_TYPES = {name: _NULLABLE.get(kind, kind) for name, kind in _LEDGER_TYPES.items()}
# Read as categories, every distinct text is made once: a million events then fit in a few hundred megabytes.
_PACKED_TYPES = {name: "category" if kind == "str" else kind for name, kind in _LEDGER_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """Everything one command produced.

    cases     case, mode, world_size and what else the run said of it; one row a case
    ledger    the contract's columns; one row an event. What a trace does not know is "?" in a column of text, -1 for
              step, microbatch and group_size, NA for bytes, NaN for times
    summary   calls and bytes of one rank by case, mode, phase, op, axis, group_size, beside the expectation (NA: none)
    verdicts  case, check, verdict, worst_name, worst_error, worst_allowed, worst_epsilons, message, unchecked (both as
              text), mode; one row a check. If a killed run lost verdicts of a case: a row of check "run", unknown
    records   the same verdicts as records (harness.verdicts.verdict.Verdict), in the same order
    timings   case, part, seconds, mode; one row a part of a case
    memory    case, rank, saved_bytes: the most that autograd held for backward; empty when it was not measured
    spans     case, rank, step, kind ("F", "B", or the op of an asynchronous call), micro, chunk, start_us, end_us,
              call_index: when the ranks of a pipeline computed; no rows where ranks took turns, or without a pipeline
    env       versions, machine, command
    notes     what is missing, was mended on reading, or is uncertain in a recording; empty for a complete run
    cut       those of the notes that say that the run was cut off, so that it may lack events
    """

    path: Path
    cases: pd.DataFrame
    ledger: pd.DataFrame
    summary: pd.DataFrame
    verdicts: pd.DataFrame
    records: tuple[Verdict, ...]
    timings: pd.DataFrame
    memory: pd.DataFrame
    spans: pd.DataFrame
    env: dict[str, Any]
    notes: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()

    @property
    def events(self) -> pd.DataFrame:
        """The ledger: its rows are events."""
        return self.ledger


def load(run: str | Path = "runs/latest") -> Run:
    """The run in this folder. Raises RunFolderError with one message when there is none or a file in it is broken."""
    path = run_folder(run)
    notes: list[str] = []
    env = environment_of(path, notes)
    cut: list[str] = []
    cases = _read_cases(path / "cases.jsonl", cut)
    ledger = _read_ledger(path, cut, traced="source" in env)
    summary = _read_summary(path / "summary.csv", ledger, [] if is_recording(path) else cut)
    records = _read_verdicts(path / "verdicts.jsonl", [] if is_recording(path) else cut)
    verdicts = frame_of(records)
    timings = csv_table(path / "timings.csv", {}, (), cut) if (path / "timings.csv").is_file() else pd.DataFrame()
    doubts: list[str] = []
    if "source" in env:
        doubts = unknown_of(env)
    elif is_recording(path):
        sizes = [int(size) for size in cases["world_size"].dropna()]
        cut += note_unfinished_ranks(path, max(sizes, default=0))
        doubts = doubts_of(path)
    memory = _if_there(path / "memory.csv", _MEMORY_TYPES, cut)
    late = 0 if is_recording(path) else len(set(cases["case"]) - set(verdicts["case"]))
    if late and "skipped" not in cases:
        cut.append(f"{late} of {len(cases)} cases have no verdict: the run was stopped before them")
    spans = _if_there(path / "spans.csv", _SPAN_TYPES, cut)
    return Run(
        path=path,
        cases=in_order(cases),
        ledger=in_order(ledger),
        summary=in_order(summary),
        verdicts=_with_mode(verdicts, cases),
        records=records,
        timings=_with_mode(timings, cases),
        memory=memory,
        spans=spans,
        env=env,
        notes=(*notes, *cut, *doubts),
        cut=tuple(cut),
    )


def _if_there(path: Path, types: dict[str, str], notes: list[str]) -> pd.DataFrame:
    """The table of these columns; empty when the run has none."""
    if path.is_file():
        return csv_table(path, types, tuple(types), notes)
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in types.items()})


def in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with mode, phase, op and axis as ordered categoricals: known words first, others sorted behind."""
    columns = {}
    for name, known in {"mode": dense_model().modes, **_ORDER}.items():
        if name in frame:
            values = frame[name].astype(str)
            other = sorted(set(values.unique()) - set(known))
            columns[name] = pd.Categorical(values, categories=[*known, *other], ordered=True)
    return frame.assign(**columns)


def _with_mode(frame: pd.DataFrame, cases: pd.DataFrame) -> pd.DataFrame:
    """The frame with the mode of each row's case as its last column."""
    if "case" not in frame:
        return frame
    modes = dict(zip(cases["case"], cases["mode"], strict=True))
    return in_order(frame.assign(mode=[str(modes.get(case, "")) for case in frame["case"]]))


def _read_cases(path: Path, notes: list[str]) -> pd.DataFrame:
    rows = json_lines(path, ("case",), notes)
    frame = pd.DataFrame(rows)
    for name in ("case", "mode", "world_size"):
        if name not in frame:
            frame[name] = pd.Series([None] * len(frame), dtype="object")
    # A line of another file, or of another program, may lack both: it is a case without them.
    modes = ["" if mode is None or mode != mode else str(mode) for mode in frame["mode"]]  # noqa: PLR0124  (NaN)
    sizes = pd.to_numeric(frame["world_size"], errors="coerce")
    if len(odd := sizes[(sizes < 1) | (sizes > MOST_RANKS)]):
        raise RunFolderError(f"{path}: world_size={odd.iloc[0]:g} is no number of ranks; legal: 1 to {MOST_RANKS}")
    frame = frame.assign(case=frame["case"].astype("str"), mode=modes, world_size=sizes)
    return frame.drop_duplicates("case", keep="last", ignore_index=True)


def _read_verdicts(path: Path, notes: list[str]) -> tuple[Verdict, ...]:
    """The verdicts of a file; a later row adds the words that a failure needs (`when`). Raises RunFolderError."""
    lines = json_lines(path, ("case", "check"), notes)
    found: list[Verdict] = []  # tests may prove a case several times: a later pass hides no failure
    failed: dict[tuple[str, str], int] = {}
    for number, row in enumerate(lines, 1):
        key = str(row["case"]), str(row["check"])
        try:
            if "verdict" in row:
                found.append(verdict_of(row))
                failed |= {key: len(found) - 1} if found[-1].failure else {}
            elif key in failed and (failure := found[failed[key]].failure):
                when = record_of(When, row.get("when"))
                found[failed[key]] = replace(found[failed[key]], failure=replace(failure, when=when))
        except ValueError as problem:
            raise RunFolderError(f"{path}, row {number}: no verdict of this layout ({problem})") from problem
    return (*found, *_note_torn_verdicts(lines, notes))


def frame_of(records: Sequence[Verdict]) -> pd.DataFrame:
    """The columns of `Run.verdicts`, but for the mode: a row for each verdict."""
    rows = [
        (
            *(one.case, one.check, one.verdict, worst.name if (worst := one.worst) else ""),
            *((worst.error, worst.allowed, worst.epsilons) if worst else (math.nan,) * 3),
            one.message,
            notes_text(one.notes),
        )
        for one in records
    ]
    return pd.DataFrame(rows, columns=[*_VERDICT_TYPES]).astype(_VERDICT_TYPES)


def _note_torn_verdicts(lines: Sequence[dict[str, Any]], notes: list[str]) -> list[Verdict]:
    """An unknown verdict for every case that lost some of its verdicts, so that the stored ones do not pass for all."""
    rows = [line for line in lines if "verdict" in line]
    stored = Counter(str(line["case"]) for line in rows)
    needed = {str(line["case"]): line["of"] for line in rows if isinstance(line.get("of"), int)}
    torn = {case: f"{stored[case]} of its {of} verdicts are stored" for case, of in needed.items() if stored[case] < of}
    if torn:
        notes.append(f"verdicts.jsonl lacks verdicts of {len(torn)} of the cases in it: the run was stopped")
    why = "the run was stopped while they were written"
    return [
        Verdict(case=case, check="run", verdict=UNKNOWN, facts=(state_text(f"{what}: {why}"),))
        for case, what in torn.items()
    ]


def _read_ledger(path: Path, notes: list[str], *, traced: bool) -> pd.DataFrame:
    for name in ("ledger.csv", "ledger.csv.gz"):
        if (path / name).is_file():
            packed = _of_its_world(csv_table(path / name, _PACKED_TYPES, COLUMNS, notes), path / name)
            return packed.astype({name: kind for name, kind in _LEDGER_TYPES.items() if kind == "str"})
    if is_recording(path):
        rows = join_ranks(path, "ledger.csv", _TRACED_TYPES if traced else _LEDGER_TYPES, notes)
        rows = _with_unknown(rows) if traced else rows
        rows = _of_its_world(rows, path / "ranks").drop_duplicates(["rank", "call_index"], keep="last")
        return rows.sort_values(["rank", "call_index"], kind="stable", ignore_index=True)
    notes.append("ledger.csv is missing: the run was stopped before its first event was stored")
    return pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in _LEDGER_TYPES.items()})


def _with_unknown(rows: pd.DataFrame) -> pd.DataFrame:
    """The ledger of traces: -1 for numbers by which events are told apart, NA for bytes, NaN for times.

    Whether a call is asynchronous is False where it is not known; `env["unknown"]["columns"]` says so.
    """
    columns: dict[str, Any] = {name: rows[name].fillna(-1).astype("int64") for name in _SETTLED}
    columns |= {name: rows[name].astype("float64") for name, kind in _LEDGER_TYPES.items() if kind == "float64"}
    columns["is_async"] = rows["is_async"].fillna(False).astype("bool")
    for name in ("payload_bytes", "wire_bytes", "rank", "world_size", "call_index"):
        columns[name] = rows[name] if rows[name].hasnans else rows[name].astype("int64")
    return rows.assign(**columns)


def _of_its_world(ledger: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The ledger. Raises RunFolderError for an event of a rank that its world does not have."""
    odd = ledger[(ledger["rank"] < 0) | (ledger["rank"] >= ledger["world_size"])]
    if len(odd):
        rank, size = odd["rank"].iloc[0], odd["world_size"].iloc[0]
        raise RunFolderError(f"{path}: rank {rank} of a world of {size} cannot be; legal: ranks from 0 below the world")
    return ledger


def _read_summary(path: Path, ledger: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    summary = pd.DataFrame({name: pd.Series(dtype=kind) for name, kind in _SUMMARY_TYPES.items()})
    if path.is_file():
        summary = csv_table(path, _SUMMARY_TYPES, SUMMARY_COLUMNS, notes)
    rest = ledger[~ledger["case"].isin(summary["case"])]
    if rest.empty and path.is_file():
        return summary
    cases = rest["case"].nunique()
    notes.append(f"summary.csv lacks {cases} of the ledger's cases: the run was stopped; added up, no expectation")
    # A sum of unknown bytes is unknown; pandas' own sum is the faster one.
    added = (lambda sizes: sizes.sum(skipna=False)) if rest["wire_bytes"].hasnans else "sum"
    one_rank = rest.groupby([*_KEYS, "rank"], observed=True).agg(
        calls=("op", "size"), payload_bytes=("payload_bytes", added), wire_bytes=("wire_bytes", added)
    )
    one_rank = one_rank.astype({name: rest[name].dtype for name in ("payload_bytes", "wire_bytes")})
    worst = one_rank.groupby(list(_KEYS), observed=True).max().reset_index()
    made = worst.assign(**{name: pd.array([pd.NA] * len(worst), dtype="Int64") for name in (*_EXPECTED, *_BY_RANK)})
    return pd.concat([summary, made], ignore_index=True) if len(summary) else made
