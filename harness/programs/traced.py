"""Writes traces as a run folder: each rank's calls as `record` would have written them, with `source` in `env.json`.

A cell that a trace does not know is empty if the ledger has a number there, and "?" if it has a word. `env.json` has
what is unknown under `unknown`: columns with how many calls, and sentences that name the option which records it.

device.csv of a rank: step, device_us, compute_us, communication_us, exposed_us (harness.traces.calls.TracedStep).
"""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shardproof.harness.errors import RequestError, ranks_text
from shardproof.harness.ledger import COLUMNS, Event, shape_text, wire_bytes
from shardproof.harness.programs.part import GROUP_COLUMNS, MODE, STEP_COLUMNS
from shardproof.harness.recording.naming import axis_name, group_word
from shardproof.harness.run_folder import LAYOUT, guard_writing, link_latest, new_run_folder
from shardproof.harness.running.store import environment
from shardproof.harness.traces.calls import FLIGHT_RECORDER, MOST_RANKS, UNKNOWN, Trace, TracedCall, sentences
from shardproof.harness.traces.reading import read_traces

DEVICE_COLUMNS = ("step", "device_us", "compute_us", "communication_us", "exposed_us")
_NUMBERS = tuple(name for name in COLUMNS if Event.__annotations__[name] is not str)
_REDUCING = ("all_reduce", "reduce_scatter", "reduce", "other")
Row = dict[str, object]


def select_steps(traces: Sequence[Trace], steps: tuple[int, int] | None) -> list[Trace]:
    """The traces with the calls of these steps alone. Raises RequestError if no trace has such a step."""
    if steps is None:
        return list(traces)
    wanted = range(*steps)
    there = sorted({step.number for trace in traces for step in trace.steps})
    if not set(wanted) & set(there):
        legal = f"legal: --steps {there[0]}:{there[-1] + 1}" if there else "legal: leave it out"
        has = f"the traces have the steps {ranks_text(there)}" if there else "the traces have no steps"
        raise RequestError(f"steps={steps[0]}:{steps[1]}: {has}; {legal}")
    return [_note_lacking_steps(trace.within(wanted), wanted) for trace in traces]


def _note_lacking_steps(trace: Trace, wanted: range) -> Trace:
    """The trace, with a note if it lacks some of these steps."""
    has = {step.number for step in trace.steps}
    if has.issuperset(wanted):
        return trace
    there = f"{min(has)}:{max(has) + 1}" if has else "none of them"
    lacks = f"unknown: some of the steps {wanted.start}:{wanted.stop}, for the trace has {there}"
    return replace(trace, notes=(*trace.notes, lacks))


def read_into_folder(name: str, out: Path) -> Path:
    """Write the run folder of one file of traces. Raises RequestError for a file that has none."""
    return write_folder(read_traces([name]), out, Path(name).name, ["read", name], {})


def write_folder(
    traces: Sequence[Trace], out: Path, name: str, command: Sequence[str], stated: Mapping[str, object]
) -> Path:
    """Write the run folder `<out>/<time>-<name>`, to which `<out>/latest` links. Raises RequestError if it cannot."""
    world_size = world_of(traces)
    folder = new_run_folder(out, name)
    starts = (trace.origin_us + call.start_us for trace in traces for call in trace.calls if call.start_us)
    first_us = min(starts, default=0.0)
    with guard_writing(folder):
        lacking: Counter[str] = Counter()
        for trace in traces:
            origin_us = first_us - trace.origin_us
            rows = ledger_rows(trace, name, world_size, origin_us)
            lacking += _write_part(folder / "ranks" / str(trace.rank), trace, rows, origin_us)
        case = {"case": name, "mode": MODE, "world_size": world_size, "skipped": "no case: nothing is checked"}
        (folder / "cases.jsonl").write_text(json.dumps(case) + "\n", encoding="utf-8")
        about = environment(command, {"program": name, "steps": ""})
        # Versions and machine are those of this process, not of the job.
        about = {key: about[key] for key in ("command", "request", "started")}
        columns = {column: lacking[column] for column in COLUMNS if lacking[column]}
        env = {
            "layout": LAYOUT,
            "program": True,
            "stated": dict(stated),
            "source": [{"file": trace.source, "format": trace.format, "rank": trace.rank} for trace in traces],
            "unknown": {"columns": columns, "sentences": sentences(traces, world_size)},
            **about,
        }
        (folder / "env.json").write_text(json.dumps(env, indent=2) + "\n", encoding="utf-8")
    link_latest(folder)
    return folder


def _is_unknown(column: str, value: object) -> bool:
    return value == UNKNOWN or (value == "" and column in _NUMBERS)


def world_of(traces: Sequence[Trace]) -> int:
    """The world size that the traces state, else the smallest that has their ranks.

    Raises RequestError if they state different ones.
    """
    stated = {trace.world_size: trace for trace in traces if trace.world_size is not None}
    if len(stated) > 1:
        (one, first), (two, second) = sorted(stated.items(), key=lambda pair: pair[0] or 0)[:2]
        rule = f"is of a world of {two} ranks, and {first.source} of one of {one}"
        raise RequestError(f"trace {second.source}: {rule}; legal: the traces of one job")
    least = max(map(_last_rank, traces), default=0) + 1
    world_size = next(iter(stated), None) or least
    if world_size > MOST_RANKS:
        rule = f"is of a world of {world_size} ranks; legal: at most {MOST_RANKS}"
        raise RequestError(f"trace {max(traces, key=_last_rank).source}: {rule}")
    for trace in traces:
        if (trace.rank or 0) >= world_size:
            raise RequestError(
                f"trace {trace.source}: is of rank {trace.rank} in a world of {world_size} ranks; "
                "legal: the traces of one job"
            )
    return world_size


def _last_rank(trace: Trace) -> int:
    """The largest rank that a trace names, or that its world has."""
    groups = {call.group for call in trace.calls}
    return max(trace.rank or 0, (trace.world_size or 1) - 1, *(rank for group in groups for rank in group))


def ledger_rows(trace: Trace, case: str, world_size: int, origin_us: float) -> Iterator[Row]:
    """The rows of ledger.csv of one rank."""
    for index, call in enumerate(trace.calls):
        yield _make_row(call, index, trace.rank or 0, case, world_size, origin_us)


def _make_row(call: TracedCall, index: int, rank: int, case: str, world_size: int, origin_us: float) -> Row:
    size, members = call.payload_bytes, call.group_size
    sent = None if size is None or members is None else wire_bytes(call.op, size, members)
    values: Row = {
        "case": case,
        "mode": MODE,
        "world_size": world_size,
        "rank": rank,
        "step": call.step,
        "microbatch": None,
        "phase": call.phase or UNKNOWN,
        "region": UNKNOWN if call.module is None else call.module,
        "op": call.op,
        "reduce_op": call.reduce_op or (UNKNOWN if call.op in _REDUCING else ""),
        "axis": axis_of(call, world_size),
        "group_size": members,
        "dtype": call.dtype or ("" if call.op == "barrier" else UNKNOWN),
        "shape": UNKNOWN if call.shapes is None else shape_text(call.shapes),
        "payload_bytes": size,
        "wire_bytes": 0 if size == 0 else sent,
        "is_async": None,
        "call_index": index,
        "start_us": None if call.start_us is None else round(call.start_us - origin_us, 3),
        "duration_us": None if call.device_us is None else round(call.device_us, 3),
        "caller": call.caller or UNKNOWN,
        "graph": "",
    }
    return {column: "" if values[column] is None else values[column] for column in COLUMNS}


def axis_of(call: TracedCall, world_size: int) -> str:
    """The axis of a call's group, as the recorder names it; torch's name of the group if its ranks are unknown."""
    if call.group:
        return axis_name(call.group, call.group_desc, {}, world_size)[0]
    return group_word(call.group_desc) or (f"group {call.group_name}" if call.group_name else UNKNOWN)


def _write_part(path: Path, trace: Trace, rows: Iterable[Row], origin_us: float) -> Counter[str]:
    """Write the part of a rank. Returns by column how many calls have no value."""
    path.mkdir(parents=True)
    about = {"rank": trace.rank, "host": "", "pid": None, "clock": f"rank {trace.rank}"}
    (path / "rank.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
    lacking, groups = Counter[str](), set[tuple[str, tuple[int, ...]]]()

    def cells() -> Iterator[Sequence[object]]:
        for row, call in zip(rows, trace.calls, strict=True):
            lacking.update(column for column in COLUMNS if _is_unknown(column, row[column]))
            if call.group:
                groups.add((str(row["axis"]), call.group))
            yield (*row.values(), "", _sent_rows(call))

    _write_table(path / "ledger.csv", (*COLUMNS, "needs_gradient", "sent_rows"), cells())
    _write_table(
        path / "groups.csv", GROUP_COLUMNS, ((axis, " ".join(map(str, ranks))) for axis, ranks in sorted(groups))
    )
    begins = ((s.number, round(s.start_us - origin_us, 3), round(s.end_us - origin_us, 3), "") for s in trace.steps)
    _write_table(path / "steps.csv", STEP_COLUMNS, begins)
    device = ((s.number, s.device_us, s.compute_us, s.communication_us, s.exposed_us) for s in trace.steps)
    _write_table(path / "device.csv", DEVICE_COLUMNS, (row for row in device if row[1] is not None))
    # A profiler begins with a step, the same on every rank; a ring buffer begins anywhere.
    lost = trace.lost if trace.format == FLIGHT_RECORDER else ""
    end = {"calls": len(trace.calls), "doubts": [], "failed": "", "unwaited": [], "lost": lost}
    (path / "end.json").write_text(json.dumps(end) + "\n", encoding="utf-8")
    return lacking


def _sent_rows(call: TracedCall) -> str:
    """The rows that an all-to-all sends to each rank; UNKNOWN if they may be uneven."""
    if call.op != "all_to_all":
        return ""
    return UNKNOWN if call.sizes_sent is None else "+".join(map(str, call.sizes_sent))


def _write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:  # names of others
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
