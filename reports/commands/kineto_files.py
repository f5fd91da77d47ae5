"""Writes a run as files of the torch profiler (Kineto), one for each rank, for HolisticTraceAnalysis and TraceLens.

A call is a `record_param_comms` row with torch's fields. If times were measured it is also a kernel row, since these
tools read kernels alone. The name says which time it is: that of the call on the host or, from traces, that of its
kernels, which are placed where the host issued it. Computation is measured in the stages of a pipeline on processes,
and is a kernel row there, without the calls that were waited for meanwhile. Times are microseconds.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from shardproof.harness.dense_model import read_case
from shardproof.harness.errors import RequestError
from shardproof.harness.ledger import OTHER
from shardproof.harness.protocols import Axes
from shardproof.harness.traces.calls import UNKNOWN, find_dtype, minus, union
from shardproof.reports.stored.files import GROUP_TYPES, is_recording
from shardproof.reports.stored.frames import Run, join_ranks

_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "all_to_all": "all_to_all",
}
"""torch's `Collective name` of an op, if it differs."""
_DTYPES = {
    "float64": "Double",
    "float32": "Float",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}
_BYTE = "Byte"
_HOST, _COMPUTE, _FIRST_STREAM = 1, 7, 8
"""The thread of the rows of calls, the stream of computation, and the first one of communication."""
_FIRST_ID = 2**31
"""HTA 0.5.0 stores the places of rows in the smallest dtype that fits the ids of kernels, so these
must not be small.
"""
_BEFORE_US = 0.001
"""A stretch ends this long before the next one begins: the least difference that is written."""
_CALLS, _KERNELS = "host time of the call", "time of its kernels, where the host issued it"
UNEVEN = "`Out msg nelems` of an all_to_all is what the rank sends: the ledger does not have what it receives"
Row = dict[str, Any]


def write_kineto(run: Run, folder: Path) -> list[str]:
    """Write `rank<r>.json` of every rank with calls, in a folder for each of several cases. Returns what they lack."""
    cases = list(run.ledger["case"].unique())
    untimed, clock = 0, _KERNELS if run.env.get("source") else _CALLS
    dry = run.env.get("request", {}).get("engine") == "dry"  # it moves nothing, so its times are not those of a call
    for number, case in enumerate(cases, 1):
        events = run.ledger[run.ledger["case"] == case].astype(dict.fromkeys(("op", "axis", "phase"), "str"))
        spans = run.spans[run.spans["case"] == case]
        within = folder if len(cases) == 1 else folder / f"case{number}"
        within.mkdir(parents=True, exist_ok=True)
        groups = _Groups(run, str(case), events)
        timed = add_durations(events, spans)
        if dry:
            timed, spans = timed.assign(duration_us=0.0), spans[:0]
        untimed += int((timed["duration_us"] <= 0).sum())
        for rank in range(int(events["world_size"].max())):
            own = timed[timed["rank"] == rank].sort_values(["start_us", "call_index"], kind="stable")
            if not len(own):
                continue
            computed = spans[(spans["rank"] == rank) & (spans["call_index"] < 0)]
            rows = [
                *_step_rows(own),
                *_phase_rows(own),
                *_call_rows(own, groups, clock),
                *_computation_rows(own, computed),
            ]
            _write_trace(within / f"rank{rank}.json", str(case), rank, groups, rows)
    notes = [UNEVEN] if (run.ledger["op"] == "all_to_all").any() else []
    unseen = f"of {untimed} of {len(run.ledger)} calls no duration is known, so that HTA and TraceLens do not see them"
    return [*notes, unseen] if untimed else notes


def add_durations(events: pd.DataFrame, spans: pd.DataFrame) -> pd.DataFrame:
    """The events, with the duration of asynchronous calls up to their wait if it was measured.

    An event whose start a trace does not know gets the start of the event before it.
    """
    calls = spans[spans["call_index"] >= 0].assign(lasts_us=lambda call: call["end_us"] - call["start_us"])
    events = events.merge(calls[["case", "rank", "call_index", "lasts_us"]], "left", ["case", "rank", "call_index"])
    known = events["duration_us"].where(events["duration_us"] > 0, events["lasts_us"].fillna(0.0))
    times = {"start_us": events["start_us"].ffill().fillna(0.0), "duration_us": known.fillna(0.0).clip(lower=0)}
    return events.drop(columns="lasts_us").assign(**times)


class _Groups:
    """The groups of a case, numbered over all ranks as torch names them; one of unknown ranks is named by its axis."""

    def __init__(self, run: Run, case: str, events: pd.DataFrame) -> None:
        axes: Axes = {}
        with suppress(RequestError):  # the mesh of other subjects' cases is not known
            axes = {} if is_recording(run.path) else read_case(case).axes
        self._of: dict[tuple[int, str], tuple[int, ...]] = {}
        if is_recording(run.path):
            listed = join_ranks(run.path, "groups.csv", GROUP_TYPES, [])
            single = listed[~listed.duplicated(["rank", "axis"], keep=False)]
            for rank, axis, ranks in single[["rank", "axis", "ranks"]].itertuples(index=False):
                self._of[int(rank), str(axis)] = tuple(map(int, str(ranks).split()))
        for axis, lists in axes.items():
            self._of |= {(rank, axis): tuple(ranks) for ranks in lists for rank in ranks}
        world = tuple(range(int(events["world_size"].max())))
        self._of |= {(rank, "world"): world for rank in world}
        used = dict.fromkeys(zip(events["rank"], events["axis"], events["group_size"], strict=True))
        self.world_size = len(world)
        known = {
            (self._of[rank, axis], axis)
            for rank, axis, size in used
            if (rank, axis) in self._of and len(self._of[rank, axis]) == size
        }
        self.names = {group: str(number) for number, group in enumerate(sorted(known))}

    def fields(self, rank: int, axis: str, size: int) -> Row:
        """torch's fields of a group in a call's row."""
        ranks = self._of.get((rank, axis), ())
        name = self.names.get((ranks, axis))
        known: Row = {"Process Group Ranks": str(list(ranks))} if name is not None else {}
        known |= {"Group size": size} if size > 0 else {}
        return {"Process Group Name": axis if name is None else name, "Process Group Description": axis, **known}


def _step_rows(events: pd.DataFrame) -> Iterator[Row]:
    for step, start, end in _find_stretches(events, ["step"]):
        if step < 0:  # of a trace without steps
            continue
        yield _make_row(f"ProfilerStep#{step}", "user_annotation", _HOST, start, end)


def _phase_rows(events: pd.DataFrame) -> Iterator[Row]:
    for phase, start, end in _find_stretches(events, ["step", "microbatch", "phase"]):
        if phase == UNKNOWN:
            continue
        word = "optimizer step" if phase == "step" else phase  # the name of a whole step in programs
        yield _make_row(f"## {word} ##", "user_annotation", _HOST, start, end)


def _find_stretches(events: pd.DataFrame, levels: list[str]) -> Iterator[tuple[Any, float, float]]:
    """The values of the last level, each until just before the next change, the last until 1 us after all calls."""
    changes = (events[levels] != events[levels].shift()).any(axis=1)
    starts = [float(start) for start in events.loc[changes, "start_us"]]
    last_us = float((events["start_us"] + events["duration_us"]).max()) + 1.0
    ends = [*(start - _BEFORE_US for start in starts[1:]), last_us]
    yield from zip(events.loc[changes, levels[-1]], starts, ends, strict=True)


def _call_rows(events: pd.DataFrame, groups: _Groups, clock: str) -> Iterator[Row]:
    """The rows of calls, and their kernels. The rows last no time, since issuing was not measured.

    `clock` says in the names of kernels which time theirs is.
    """
    free_us: list[float] = []
    for number, event in enumerate(events.to_dict("records"), _FIRST_ID):
        start, end = float(event["start_us"]), float(event["start_us"] + event["duration_us"])
        fields = {
            **_payload_fields(event),
            **groups.fields(int(event["rank"]), str(event["axis"]), int(event["group_size"])),
        }
        told = {name: event[name] for name in ("phase", "region", "microbatch", "caller")}
        ids = {"External id": number, "correlation": number}
        yield _make_row("record_param_comms", "cpu_op", _HOST, start, start, **ids, **fields, **told)
        if end > start:
            lane = next((lane for lane, free in enumerate(free_us) if free <= start), len(free_us))
            free_us[lane:] = [end, *free_us[lane + 1 :]]
            stream = _FIRST_STREAM + lane
            name = f"ncclKernel_{event['op']}({clock})"
            yield _make_row(name, "kernel", stream, start, end, **ids, device=0, stream=stream, **fields)


def _payload_fields(event: Mapping[Any, Any]) -> Row:
    """torch's fields of the payload, which is in bytes if the dtype is unknown; an unknown payload is left out."""
    op = str(event["op"])
    told = {"Collective name": OTHER if op == OTHER else _NAMES.get(op, op)}
    if pd.isna(event["payload_bytes"]):
        return told
    size = int(event["payload_bytes"])
    dtype, known = _DTYPES.get(str(event["dtype"]), str(event["dtype"]).capitalize()), find_dtype(str(event["dtype"]))
    dtype, elements = (_BYTE, size) if known is None else (dtype, size // known.item_bytes)
    part = elements // max(1, int(event["group_size"]))
    inside, out = {"all_gather": (part, elements), "reduce_scatter": (elements, part)}.get(op, (elements, elements))
    return {
        **told,
        "dtype": dtype,
        "In msg nelems": inside,
        "Out msg nelems": out,
        "In split size": "[]",
        "Out split size": "[]",
    }


def _computation_rows(events: pd.DataFrame, spans: pd.DataFrame) -> Iterator[Row]:
    """Forwards and backwards of a pipeline's stage, without the calls that were waited for at once."""
    waited = events[~events["is_async"]]
    calls = union(zip(waited["start_us"], waited["start_us"] + waited["duration_us"], strict=True))
    for kind, micro, start, end in spans[["kind", "micro", "start_us", "end_us"]].itertuples(index=False, name=None):
        name = f"{'forward' if kind == 'F' else 'backward'} {micro} (host time of the stage)"
        for begin, stop in minus([(start, end)], calls):
            yield _make_row(name, "kernel", _COMPUTE, begin, stop, device=0, stream=_COMPUTE)


def _make_row(name: str, category: str, track: int, start_us: float, end_us: float, **args: Any) -> Row:
    """A row. Its first keys are in torch's order, which streaming readers need."""
    start, end = round(start_us, 3), round(end_us, 3)
    spent = round(end - start, 3)
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": track, "ts": start, "dur": spent, "args": args}


def _write_trace(path: Path, case: str, rank: int, groups: _Groups, rows: list[Row]) -> None:
    config = [
        {"pg_name": name, "pg_desc": axis, "pg_size": len(ranks), "ranks": list(ranks)}
        for (ranks, axis), name in groups.names.items()
    ]
    about = {"rank": rank, "world_size": groups.world_size, "pg_count": len(config), "pg_config": config}
    header = {"schemaVersion": 1, "distributedInfo": about, "displayTimeUnit": "ms", "traceName": case}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(header).removesuffix("}") + ', "traceEvents": [')
        rows.sort(key=lambda row: (row["ts"], -row["dur"]))
        file.write(",".join("\n" + json.dumps(row) for row in rows))
        file.write("\n]}\n")
