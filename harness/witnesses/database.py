"""Nsight Systems as a witness: the ledger rebuilt from an exported sqlite database and nothing else.

Every rank opens with a mark (rank, case, world size) and ends with one that counts its calls
(harness.recording.ranges). A database in which a rank, an end or a call is missing is refused: tools drop events
without a word. Ids of domains and categories are per process, and a later case of a process gives them anew. Times in
nanoseconds there, in microseconds here. Schema: nsys 2022.4 and later, NVTX_EVENTS.eventType: 75 domain, 33 category,
59 push/pop, 60 start/end, 34 mark.
"""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardproof.harness.errors import MachineError
from shardproof.harness.ledger import BACKWARD, OPS
from shardproof.harness.recording.ranges import DOMAIN
from shardproof.harness.witnesses.agreement import UNKNOWN, Sighting

_DOMAIN, _CATEGORY, _MARK = 75, 33, 34
_SETTLED_BY = {"forward": "data", "step": "grad_sync"}
"""Phase of calls between a backward or step and what follows, by what follows (harness.recording.attribution)."""
_SETTLED_AT_END = {**dict.fromkeys(BACKWARD, "grad_sync"), "step": "metric"}
_QUERY = """
    SELECT e.start, e.end, e.eventType, COALESCE(e.text, s.value), e.category, e.domainId, e.globalTid, e.int64Value
    FROM NVTX_EVENTS AS e LEFT JOIN StringIds AS s ON e.textId = s.id ORDER BY e.start, e.rowid
"""


class _Entry(NamedTuple):
    """A range or mark of our domain; `thread` is nsys's global id of process and thread."""

    start_ns: int
    end_ns: int | None
    message: str
    category: str
    process: int
    thread: int
    payload: int | None


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


def read_database(path: Path) -> dict[str, list[Sighting]]:
    """The sightings of every case by its text. Raises MachineError for a database that does not reconcile."""
    entries = _entries(path)
    stretches = _stretches([entry for entry in entries if entry.category == "rank"])
    if not stretches:
        raise _refused("it holds no rank of shardproof")
    shared = {s.process for s in stretches if any(o.process == s.process and o.thread != s.thread for o in stretches)}
    seen: dict[str, list[Sighting]] = {}
    for stretch in stretches:
        alone = stretch.process not in shared  # the rank has its process to itself, else it is its thread
        own = [e for e in entries if (e.process == stretch.process if alone else e.thread == stretch.thread)]
        mine = [e for e in own if stretch.start_ns <= e.start_ns <= stretch.end_ns]
        seen.setdefault(stretch.case, []).extend(_sightings(stretch, mine))
    for case in seen:
        ranks = [(stretch.rank, stretch.world_size) for stretch in stretches if stretch.case == case]
        if sorted(rank for rank, _ in ranks) != list(range(world_size := ranks[0][1])):
            there = ", ".join(str(rank) for rank, _ in ranks)
            raise _refused(f"{case} has {world_size} ranks, and the database has {there}")
    return seen


def _refused(why: str) -> MachineError:
    return MachineError(f"witness nsys: the database is refused: {why}")


def _entries(path: Path) -> list[_Entry]:
    """Ranges and marks of our domain in order of time, names in place of ids."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            rows = database.execute(_QUERY).fetchall()
    except sqlite3.Error as problem:
        raise _refused(f"{path.name} holds no NVTX events ({problem})") from problem
    domains = {(_process(tid), domain): text for _, _, kind, text, _, domain, tid, _ in rows if kind == _DOMAIN}
    found, categories = [], {}
    for start, end, kind, text, category, domain, tid, number in rows:
        process = _process(tid)
        if kind == _CATEGORY:  # by time: the next case of a process names its categories anew
            categories[process, domain, category] = text
        elif kind != _DOMAIN and domains.get((process, domain)) == DOMAIN:
            name = categories.get((process, domain, category), "")
            found.append(_Entry(start, end, text or "", name, process, tid, number))
    return found


def _process(thread: int) -> int:
    return thread // 0x1000000


def _stretches(marks: Iterable[_Entry]) -> list[_Stretch]:
    found = []
    open_: dict[int, tuple[int, dict[str, object]]] = {}
    for mark in marks:
        facts = json.loads(mark.message)
        if "calls" not in facts:
            open_[mark.thread] = (mark.start_ns, facts)
            continue
        start_ns, opened = open_.pop(mark.thread, (0, {}))
        if opened.get("rank") != facts["rank"]:
            raise _refused(f"rank {facts['rank']} has an end without a beginning")
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
        raise _refused(f"rank {facts['rank']} has no last mark, so what it did last is lost")
    return found


def _sightings(stretch: _Stretch, entries: Sequence[_Entry]) -> list[Sighting]:
    calls = [entry for entry in entries if entry.category.partition(" ")[0] in OPS]
    if len(calls) != stretch.calls:
        raise _refused(f"rank {stretch.rank} says that it made {stretch.calls} calls, {len(calls)} are there")
    phases = [entry for entry in entries if entry.category == "phase"]
    return [_sighting(stretch.rank, index, call, _phase(call, phases)) for index, call in enumerate(calls)]


def _sighting(rank: int, index: int, call: _Entry, phase: str) -> Sighting:
    op, _, group = call.category.partition(" ")
    return Sighting(
        rank=rank,
        index=index,
        op=op,
        groups=(tuple(sorted(map(int, group.split(",")))),) if group else (),
        payload_bytes=UNKNOWN if call.payload is None else call.payload,
        phase=phase,
        region=call.message.removesuffix(op).strip(),
        start_us=call.start_ns / 1e3,
        duration_us=0.0 if call.end_ns is None else (call.end_ns - call.start_ns) / 1e3,
    )


def _phase(call: _Entry, phases: Sequence[_Entry]) -> str:
    """The phase whose range covers the call, else what follows settles it, else what came last."""
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
