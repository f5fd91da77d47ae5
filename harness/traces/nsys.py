"""Reads a database that nsys exported: our own nvtx ranges where a program drew them, else those of NCCL.

Every rank of a recorded program opens with a mark (rank, case, world size) and ends with one that counts its calls
(harness.recording.ranges). A database in which a rank, an end or a call is missing is refused: tools drop events
without a word. Ids of domains and categories are per process, and a later case of a process gives them anew.

A range of NCCL names an op, and its payload has the bytes of one message and the communicator. Size and rank of a
communicator are in the payload of the call that made it. Dtypes, names of groups and global ranks are in none. This was
written from NCCL's payload schemas and tried on a database made by hand, not on that of a job.

Times in the database are nanoseconds. Schema: nsys 2022.4 and later, NVTX_EVENTS.eventType: 75 domain, 33 category,
59 push/pop, 60 start/end, 34 mark.
"""

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardproof.harness.errors import RequestError
from shardproof.harness.ledger import BACKWARD, OPS, OTHER, REDUCE_OPS
from shardproof.harness.recording.ranges import DOMAIN
from shardproof.harness.traces.calls import NSYS, Trace, TracedCall, find_op

_DOMAIN, _CATEGORY = 75, 33
_NCCL = "NCCL"
_SETTLED_BY = {"forward": "data", "step": "grad_sync"}
"""The phase of calls between a backward or step and what follows, by what follows (harness.recording.attribution)."""
_SETTLED_AT_END = {**dict.fromkeys(BACKWARD, "grad_sync"), "step": "metric"}
_QUERY = """
    SELECT e.start, e.end, e.eventType, COALESCE(e.text, s.value), e.category, e.domainId, e.globalTid, e.int64Value,
    {payload} FROM NVTX_EVENTS AS e LEFT JOIN StringIds AS s ON e.textId = s.id ORDER BY e.start, e.rowid
"""
_NO_PAYLOADS = (
    "unknown: what NCCL's ranges hold, for this nsys did not export it; nsys export --type sqlite of 2024.1 or later"
)


class _Entry(NamedTuple):
    """A range or mark; `thread` is nsys's global id of process and thread, `fields` NCCL's payload."""

    start_ns: int
    end_ns: int | None
    message: str
    category: str
    process: int
    thread: int
    payload: int | None
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Part of one rank in one case: from its first mark to its last one."""

    case: str
    rank: int
    world_size: int
    process: int
    thread: int
    start_ns: int
    end_ns: int
    calls: int


def read_nsys(path: Path) -> list[Trace]:
    """The traces of the ranks in a database. Raises RequestError for one that is inconsistent, or has no calls."""
    domains = _entries(path)
    if domains.get(DOMAIN):
        cases = read_own_ranges(path)
        if len(cases) > 1:
            rule = f"holds {len(cases)} cases of shardproof"
            raise _refuse_file(path, f"{rule}; legal: the report of one program")
        return next(iter(cases.values()))
    if not (entries := domains.get(_NCCL)):
        rule = "holds no nvtx ranges of NCCL"
        raise _refuse_file(path, f"{rule}; legal: nsys profile --trace=cuda,nvtx, of NCCL 2.19 or later")
    return [_of_nccl(path, process, entries) for process in dict.fromkeys(entry.process for entry in entries)]


def read_own_ranges(path: Path) -> dict[str, list[Trace]]:
    """The traces of every case that shardproof ran, by its text. Raises RequestError if they are inconsistent."""
    entries = _entries(path).get(DOMAIN, [])
    stretches = _stretches(path, [entry for entry in entries if entry.category == "rank"])
    if not stretches:
        raise _refuse_file(path, "it holds no rank of shardproof")
    shared = {s.process for s in stretches if any(o.process == s.process and o.thread != s.thread for o in stretches)}
    found: dict[str, list[Trace]] = {}
    for stretch in stretches:
        alone = stretch.process not in shared  # a rank is a process of its own, or a thread
        own = [e for e in entries if (e.process == stretch.process if alone else e.thread == stretch.thread)]
        mine = [e for e in own if stretch.start_ns <= e.start_ns <= stretch.end_ns]
        found.setdefault(stretch.case, []).append(_of_stretch(path, stretch, mine))
    for case in found:
        ranks = [(stretch.rank, stretch.world_size) for stretch in stretches if stretch.case == case]
        if sorted(rank for rank, _ in ranks) != list(range(world_size := ranks[0][1])):
            there = ", ".join(str(rank) for rank, _ in ranks)
            raise _refuse_file(path, f"{case} has {world_size} ranks, and the database has {there}")
    return found


def _refuse_file(path: Path, why: str) -> RequestError:
    return RequestError(f"trace {path}: the database is refused: {why}")


def _entries(path: Path) -> dict[str, list[_Entry]]:
    """Ranges and marks by domain, in order of time, with names in place of ids."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            columns = {row[1] for row in database.execute("PRAGMA table_info(NVTX_EVENTS)")}
            rows = database.execute(_QUERY.format(payload=_payload(columns))).fetchall()
    except sqlite3.Error as problem:
        raise _refuse_file(path, f"{path.name} holds no NVTX events ({problem})") from problem
    domains = {(_process(row[6]), row[5]): row[3] for row in rows if row[2] == _DOMAIN}
    found: dict[str, list[_Entry]] = {}
    categories: dict[tuple[int, int, int], str] = {}
    for start, end, kind, text, category, domain, tid, number, fields in rows:
        process = _process(tid)
        if kind == _CATEGORY:  # in order of time, since the next case of a process names its categories again
            categories[process, domain, category] = text
        elif kind != _DOMAIN:
            name = categories.get((process, domain, category), "")
            entry = _Entry(start, end, text or "", name, process, tid, number, _fields(fields))
            found.setdefault(domains.get((process, domain), ""), []).append(entry)
    return found


def _payload(columns: set[str]) -> str:
    """The column of the JSON payloads of ranges, which depends on the release."""
    if "jsonText" in columns and "jsonTextId" in columns:
        return "COALESCE(e.jsonText, (SELECT value FROM StringIds WHERE id = e.jsonTextId))"
    if "jsonTextId" in columns:
        return "(SELECT value FROM StringIds WHERE id = e.jsonTextId)"
    return "e.jsonText" if "jsonText" in columns else "NULL"


def _fields(text: str | None) -> Mapping[str, Any]:
    """The fields of a payload by their names in lower case; empty without a payload."""
    found: Any = json.loads(text) if text else {}
    while isinstance(found, list):
        found = found[0] if found else {}
    return {str(name).lower(): value for name, value in found.items()} if isinstance(found, dict) else {}


def _process(thread: int) -> int:
    return thread // 0x1000000


def _stretches(path: Path, marks: Iterable[_Entry]) -> list[_Stretch]:
    found = []
    open_: dict[int, tuple[int, dict[str, object]]] = {}
    for mark in marks:
        facts = json.loads(mark.message)
        if "calls" not in facts:
            open_[mark.thread] = (mark.start_ns, facts)
            continue
        start_ns, opened = open_.pop(mark.thread, (0, {}))
        if opened.get("rank") != facts["rank"]:
            raise _refuse_file(path, f"rank {facts['rank']} has an end without a beginning")
        found.append(
            _Stretch(
                case=str(opened["case"]),
                rank=facts["rank"],
                world_size=int(str(opened["world_size"])),
                process=mark.process,
                thread=mark.thread,
                start_ns=start_ns,
                end_ns=mark.start_ns,
                calls=facts["calls"],
            )
        )
    for _start_ns, facts in open_.values():
        raise _refuse_file(path, f"rank {facts['rank']} has no last mark, so what it did last is lost")
    return found


def _of_stretch(path: Path, stretch: _Stretch, entries: Sequence[_Entry]) -> Trace:
    calls = [entry for entry in entries if entry.category.partition(" ")[0] in OPS]
    if len(calls) != stretch.calls:
        rule = f"rank {stretch.rank} says that it made {stretch.calls} calls, {len(calls)} are there"
        raise _refuse_file(path, rule)
    phases = [entry for entry in entries if entry.category == "phase"]
    return Trace(
        source=str(path),
        format=NSYS,
        rank=stretch.rank,
        world_size=stretch.world_size,
        calls=tuple(_own_call(call, _phase(call, phases)) for call in calls),
    )


def _own_call(call: _Entry, phase: str) -> TracedCall:
    op, group, dtype = (*call.category.split(" "), "", "")[:3]
    ranks = tuple(map(int, group.split(","))) if group else ()
    return TracedCall(
        op=op,
        name=op,
        payload_bytes=call.payload,
        dtype=dtype,
        group=ranks,
        group_size=len(ranks) or None,
        phase=phase,
        module=call.message.removesuffix(op).strip(),
        start_us=call.start_ns / 1e3,
        host_us=_spent_us(call),
    )


def _spent_us(call: _Entry) -> float:
    return 0.0 if call.end_ns is None else (call.end_ns - call.start_ns) / 1e3


def _phase(call: _Entry, phases: Sequence[_Entry]) -> str:
    """The phase whose range covers the call, else the one that the next phase settles, else that at the end."""
    last = ""
    for phase in phases:
        if phase.start_ns > call.start_ns:
            if phase.message in _SETTLED_BY:
                return _SETTLED_BY[phase.message]
        elif phase.end_ns is None or phase.end_ns >= call.start_ns:
            return phase.message
        else:
            last = phase.message
    return _SETTLED_AT_END.get(last, "data")


def _of_nccl(path: Path, process: int, entries: Sequence[_Entry]) -> Trace:
    """The calls of a process of NCCL. Its rank is that in its largest communicator, which is the job's."""
    own = [entry for entry in entries if entry.process == process]
    made = [entry.fields for entry in own if entry.message.startswith("ncclCommInit") and _size(entry.fields)]
    job = max(made, key=lambda fields: _size(fields) or 0, default={})
    sizes = {_communicator(fields): _size(fields) for fields in made}
    calls = [entry for entry in own if find_op(entry.message) != OTHER]
    return Trace(
        source=str(path),
        format=NSYS,
        rank=_number(job, "rank"),
        world_size=_size(job),
        calls=tuple(_nccl_call(entry, sizes) for entry in calls),
        notes=() if any(entry.fields for entry in calls) else (_NO_PAYLOADS,),
        backend="nccl",
    )


def _nccl_call(entry: _Entry, sizes: Mapping[object, int | None]) -> TracedCall:
    """A call of NCCL, which states the message of one rank. The payload of all_gather, reduce_scatter and all_to_all is
    that of all ranks.
    """
    op, message = find_op(entry.message), _number(entry.fields, "message size", "size [bytes]", "bytes")
    size = sizes.get(_communicator(entry.fields))
    of_all = op in ("all_gather", "reduce_scatter", "all_to_all")
    payload = message if not of_all else None if message is None or size is None else message * size
    word = str(next((value for name, value in entry.fields.items() if "reduction" in name), ""))
    reduce_op = word.lower().removeprefix("nccl")
    return TracedCall(
        op=op,
        name=entry.message,
        payload_bytes=payload,
        reduce_op=reduce_op if reduce_op in REDUCE_OPS else "",
        group_name=str(_communicator(entry.fields) or ""),
        group_size=size,
        start_us=entry.start_ns / 1e3,
        host_us=_spent_us(entry),
    )


def _communicator(fields: Mapping[str, Any]) -> object:
    return next((value for name, value in fields.items() if "comm" in name), None)


def _size(fields: Mapping[str, Any]) -> int | None:
    return _number(fields, "no. of ranks", "nranks", "ranks")


def _number(fields: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is an integer. Its name may have further words, except "rank"."""
    for wanted in names:
        for name, value in fields.items():
            if (name == wanted or (wanted != "rank" and wanted in name)) and isinstance(value, int):
                return value
    return None
