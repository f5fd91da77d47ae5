"""The witnesses of a run: one session a tool for all cases, then every case's ledger held against all of them.

Who is independent of whom: the torch profiler hears torch's own rows and the Flight Recorder's log, the closed form
knows formulas only. The ranges that nsys stores are drawn from what our recorder is told, so nsys shows that nothing is
lost or renamed on the way and no more; on a GPU its timeline has NCCL's kernels beside them. Sessions have processes of
their own whatever engine proves the case, because a Python process group of the in-process engine passes by the
dispatcher, where the profiler listens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.diagnosis import case_text
from harness.errors import MachineError
from harness.evidence import FAIL, PASS, UNKNOWN, Finding, Verdict
from harness.ledger import Event
from harness.protocols import CaseLike, TermLike
from harness.witnesses.agreement import NOT_ASKED, Agreement, agreement, finding
from harness.witnesses.nsys import on_gpus
from harness.witnesses.session import Job, Session, hold
from harness.witnesses.sighting import Sighting, group_text, of_ledger
from harness.witnesses.timing import spread, timed

__all__ = ["CHECK", "INDEPENDENCE", "Told", "Witnesses", "witnesses"]

CHECK = "witnesses"
INDEPENDENCE = (
    "of the witnesses, nsys stores ranges that our recorder draws: it shows that no event was lost or renamed on the "
    "way; the torch profiler and the closed form see for themselves"
)
_COLUMNS = {
    "witnesses.csv": (
        *("case", "rank", "index", "phase", "region", "op", "group", "payload_bytes"),
        *("ledger", "recorder", "torch", "nsys", "closed_form"),
    ),
    "collectives.csv": (
        *("case", "rank", "index", "phase", "region", "op", "group", "payload_bytes"),
        *("start_us", "duration_us", "overlapped_us", "exposed_us", "late_us"),
    ),
    "sessions.csv": ("case", "tool", "rank", "runs", "median_s", "low_s", "high_s", "watched_s", "peak_bytes"),
}
Rows = list[tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the witnesses say of one case: the verdict, and rows for the run folder by file name."""

    verdict: Verdict
    tables: Mapping[str, tuple[tuple[str, ...], Rows]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnesses:
    """The sessions by tool and case; `notes` say what is missing and who is not independent."""

    sessions: Mapping[str, Mapping[str, Session]]
    notes: tuple[str, ...]

    def told(self, case: CaseLike, events: Sequence[Event], terms: Sequence[TermLike] | None) -> Told:
        """Hold the case's ledger (the recorder's of a session when the proof left none) against every witness."""
        text = case_text(case)
        held = {tool: of[text] for tool, of in self.sessions.items() if text in of}
        good = {tool: session for tool, session in held.items() if not session.problem}
        recorded = [e for session in list(good.values())[:1] for measured in session.ranks for e in measured.events]
        if not recorded:
            return _told(Finding(verdict=UNKNOWN, message=_nothing(held, self.notes)), text, {})
        base = tuple(events) or tuple(recorded)
        others: dict[str, Sequence[Sighting]] = {"recorder": of_ledger(recorded, case.axes)} if events else {}
        others |= {tool: session.seen for tool, session in good.items()}
        agreed = agreement(of_ledger(base, case.axes), others, base, terms)
        tables = {
            "witnesses.csv": _side_by_side(text, agreed),
            "collectives.csv": _collectives(text, good, recorded, case),
            "sessions.csv": list(_sessions(text, good)),
        }
        found = _undisturbed(finding(agreed), good)
        problems = tuple(f"{tool}: {session.problem}" for tool, session in held.items() if session.problem)
        if problems and found.verdict == PASS:
            found = replace(found, verdict=UNKNOWN, message=f"{found.message}; {'; '.join(problems)}")
        return _told(found, text, tables)


def witnesses(
    cases: Sequence[CaseLike], subject: str, tools: Sequence[str], folder: Path, *, device: str, timeout_s: float
) -> Witnesses:
    """Hold one session a tool; a tool that is missing or broken leaves a note and takes nothing else along."""
    sessions, notes = {}, [INDEPENDENCE, *([on_gpus()] if device == "cpu" else [])] if "nsys" in tools else []
    for tool in tools if cases else ():
        job = Job(subject=subject, cases=tuple(cases), tool=tool, device=device, timeout_s=timeout_s)
        try:
            sessions[tool] = hold(job, folder / tool)
        except MachineError as error:
            notes.append(str(error))
    return Witnesses(sessions=sessions, notes=tuple(notes))


def _told(found: Finding, text: str, tables: Mapping[str, Rows]) -> Told:
    return Told(
        verdict=Verdict(
            case=text,
            check=CHECK,
            verdict=found.verdict,
            worst=found.worst,
            message=found.message,
            unchecked=found.unchecked,
        ),
        tables={name: (_COLUMNS[name], rows) for name, rows in tables.items() if rows},
    )


def _nothing(held: Mapping[str, Session], notes: Sequence[str]) -> str:
    reasons = [session.problem for session in held.values()] or [note for note in notes if note.startswith("witness ")]
    return f"nothing was witnessed: {'; '.join(reasons) or 'no session was held'}"


def _undisturbed(found: Finding, sessions: Mapping[str, Session]) -> Finding:
    """A witness that changes a bit of the outcome is a failure, whatever it saw."""
    for tool, session in sessions.items():
        if session.disturbed:
            ranks = ",".join(map(str, session.disturbed))
            message = f"the outcome of rank {ranks} is not the same bit for bit when the recorder and {tool} watch"
            return replace(found, verdict=FAIL, message=message)
    return found


def _place(text: str, seen: Sighting | None, rank: int, index: int) -> tuple[object, ...]:
    if seen is None:
        return (text, rank, index, "", "", "", "", "")
    return (text, rank, index, seen.phase, seen.region, seen.op, group_text(seen), seen.payload_bytes)


def _side_by_side(text: str, agreed: Agreement) -> Rows:
    names = _COLUMNS["witnesses.csv"][-4:]
    return [
        (
            *_place(text, row.recorded, row.rank, row.index),
            "=" if row.recorded else "missing",
            *(row.words.get(name, NOT_ASKED) for name in names),
        )
        for row in agreed.rows
    ]


def _collectives(text: str, good: Mapping[str, Session], recorded: Sequence[Event], case: CaseLike) -> Rows:
    """Times from the profiler's traces; region and phase from the recorder of the same run, where the order is one."""
    session = good.get("torch")
    if session is None:
        return []
    mine = {(s.rank, s.index): s for s in of_ledger(recorded, case.axes)}
    rows: Rows = []
    first_us = min((seen.start_us for seen in session.seen), default=0.0)
    for one in timed(session.folder, session.seen):
        place = mine.get((one.seen.rank, one.seen.index), one.seen)
        times = (one.seen.start_us - first_us, one.duration_us, one.overlapped_us, one.exposed_us, one.late_us)
        rows.append((*_place(text, place, place.rank, place.index), *(f"{t:.3f}" for t in times)))
    return rows


def _sessions(text: str, good: Mapping[str, Session]) -> Iterator[tuple[object, ...]]:
    for tool, session in good.items():
        for rank, measured in enumerate(session.ranks):
            seconds = spread(measured.seconds)
            times = (seconds.median, seconds.low, seconds.high, measured.watched_s)
            yield (text, tool, rank, len(measured.seconds), *(f"{t:.6f}" for t in times), measured.peak_bytes)
