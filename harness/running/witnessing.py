"""The witnesses of a run: one session a tool for all cases, then every case's ledger held against all of them.

Independence of the witnesses: the torch profiler hears torch's own rows and the Flight Recorder's log, the closed form
knows formulas only. The ranges that nsys stores are drawn from our recorder's observations. So nsys shows that nothing
is lost or renamed on the way and no more; on a GPU its timeline has NCCL's kernels beside them. Sessions have processes
of their own whatever engine proves the case, since calls on the in-process engine's groups, which are Python classes,
do not reach the dispatcher, where the profiler listens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.witness_checks import (
    CHECK,
    check_undisturbed,
    explain_empty_sessions,
    judge_agreement,
    qualify_finding,
)
from shardproof.harness.diagnosing.diagnosis import Diagnosis
from shardproof.harness.diagnosing.witness_lines import diagnose_disagreement, failed_witnesses
from shardproof.harness.errors import MachineError
from shardproof.harness.ledger import Event, name_unmapped_operators
from shardproof.harness.protocols import CaseLike, TermLike, case_text
from shardproof.harness.running.request import Request
from shardproof.harness.running.result import CaseResult, verdict_on
from shardproof.harness.running.store import Store
from shardproof.harness.subject import NamedSubject, Unanswered, refusal
from shardproof.harness.traces.nsys_export import on_gpus
from shardproof.harness.verdicts.facts import FailedCheck, state_fact
from shardproof.harness.verdicts.verdict import FAIL, UNKNOWN, Verdict
from shardproof.harness.witnesses.agreement import NOT_ASKED, Agreement, Sighting, agreement, group_text, of_ledger
from shardproof.harness.witnesses.chosen import steps_text, terms_of
from shardproof.harness.witnesses.measured import SessionRequest
from shardproof.harness.witnesses.session import Session, hold
from shardproof.harness.witnesses.spread import spread
from shardproof.harness.witnesses.torch_trace import time_sightings

INDEPENDENCE = (
    "of the witnesses, nsys stores ranges that our recorder draws: it shows that no event was lost or renamed on the "
    "way; the torch profiler and the closed form see for themselves"
)
_PLACE = ("case", "rank", "index", "phase", "region", "op", "group", "payload_bytes")
_COLUMNS = {
    "witnesses.csv": (*_PLACE, "ledger", "recorder", "torch", "nsys", "closed_form"),
    "collectives.csv": (*_PLACE, "start_us", "duration_us", "overlapped_us", "exposed_us", "late_us"),
    "sessions.csv": ("case", "tool", "rank", "runs", "median_s", "low_s", "high_s", "watched_s", "peak_bytes", "steps"),
}
Rows = list[tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessResult:
    """The witnesses' verdict on one case, rows for the run folder by file name, and the diagnosis of a failure."""

    verdict: Verdict
    tables: Mapping[str, tuple[tuple[str, ...], Rows]]
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnesses:
    """The sessions by tool and case; `notes` say what is missing and who is not independent.

    `steps` are the chosen ones, None for whole runs; `subject` and `options` repeat a case with its witnesses.
    """

    sessions: Mapping[str, Mapping[str, Session]]
    notes: tuple[str, ...]
    subject: str
    steps: range | None = None
    options: str = ""

    def judge_case(
        self,
        case: CaseLike,
        events: Sequence[Event],
        terms: Sequence[TermLike] | None,
        expected: Callable[[Any], Any] | None = None,
    ) -> WitnessResult:
        """Hold the case's ledger (the recorder's of a session when the proof left none) against every witness.

        `expected` is the subject's closed form, called for the terms of chosen steps.
        """
        text = case_text(case)
        sessions = {tool: of[text] for tool, of in self.sessions.items() if text in of}
        good = {tool: session for tool, session in sessions.items() if not session.problem}
        recorded = [e for session in list(good.values())[:1] for measured in session.ranks for e in measured.events]
        if not recorded:
            return _result(Finding(verdict=UNKNOWN, facts=(explain_empty_sessions(sessions, self.notes),)), text, {})
        recorded = self._choose_events(recorded)
        if names := name_unmapped_operators(recorded):
            unmapped = state_fact("unmapped_rows", operators=names)
            return _result(Finding(verdict=UNKNOWN, facts=(unmapped,)), text, {})
        base = self._choose_events(events) or recorded
        others: dict[str, Sequence[Sighting]] = {"recorder": of_ledger(recorded)} if events else {}
        others |= {tool: session.seen for tool, session in good.items()}
        untold = ""
        if terms is not None and self.steps is not None:
            terms, untold = terms_of(self.steps, case, terms, expected)
        agreed = agreement(of_ledger(base), others, base, terms, case.axes)
        steps = "" if self.steps is None else steps_text(self.steps)
        tables = {
            "witnesses.csv": _side_by_side(text, agreed),
            "collectives.csv": _collectives(text, good, recorded, case),
            "sessions.csv": list(_sessions(text, good, steps)),
        }
        outcome = check_undisturbed(judge_agreement(agreed, steps), good)
        if outcome.verdict == FAIL:
            disturbed = [rank for session in good.values() for rank in session.disturbed]
            diagnosis = diagnose_disagreement(case, agreed, outcome, disturbed)
            failure = failed_witnesses(diagnosis, agreed, case, self.subject, self.options)
            return replace(_result(outcome, text, tables, failure), diagnosis=diagnosis)
        return _result(qualify_finding(outcome, sessions, untold), text, tables)

    def _choose_events(self, events: Sequence[Event]) -> list[Event]:
        return [event for event in events if self.steps is None or event.step in self.steps]

    def add_witness_verdict(self, result: CaseResult, subject: NamedSubject, store: Store) -> CaseResult:
        """The result with the witnesses' verdict, their tables stored."""
        if result.skipped:
            return result
        call: Any = subject.call
        expected = call.expected if result.expectation is not None else None
        judged = self.judge_case(result.case, result.events, result.expectation, expected)
        for name, (columns, rows) in judged.tables.items():
            store.extend(name, columns, rows)
        diagnoses = {**result.diagnoses, **({judged.verdict.check: judged.diagnosis} if judged.diagnosis else {})}
        return replace(result, verdicts=(*result.verdicts, judged.verdict), diagnoses=diagnoses)


def witnesses(
    cases: Sequence[CaseLike],
    subject: str,
    tools: Sequence[str],
    folder: Path,
    *,
    device: str,
    timeout_s: float,
    steps: range | None = None,
    options: str = "",
) -> Witnesses:
    """Hold one session a tool; a tool that is missing or broken leaves a note, and the other tools still have theirs.

    `steps` are watched, None for whole runs; `options` are further words of the command that repeats a case.
    """
    sessions, notes = {}, [INDEPENDENCE, *([on_gpus()] if device == "cpu" else [])] if "nsys" in tools else []
    for tool in tools if cases else ():
        job = SessionRequest(
            subject=subject, cases=tuple(cases), tool=tool, device=device, timeout_s=timeout_s, steps=steps
        )
        try:
            sessions[tool] = hold(job, folder / tool)
        except MachineError as error:
            notes.append(str(error))
    words = [options, "--profile", ",".join(tools), *([] if steps is None else ["--profile-steps", steps_text(steps)])]
    return Witnesses(
        sessions=sessions, notes=tuple(notes), subject=subject, steps=steps, options=" ".join(words).strip()
    )


def witnesses_of(request: Request, folder: Path) -> Witnesses:
    """The sessions of all cases of a request that its subject takes; `folder` is for their traces."""
    return witnesses(
        [case for case in request.cases if _takes(case, request.subject)],
        request.subject.address,
        request.profile,
        folder,
        device=request.device,
        timeout_s=request.timeout_s,
        steps=request.profile_steps,
        options=request.options,
    )


def _takes(case: CaseLike, subject: NamedSubject) -> bool:
    """Whether the subject takes the case; if it raises when it is asked, it does not, and the proof gives the error."""
    try:
        return not refusal(case, subject)
    except Unanswered:
        return False


def _result(found: Finding, text: str, tables: Mapping[str, Rows], failure: FailedCheck | None = None) -> WitnessResult:
    return WitnessResult(
        verdict=verdict_on(found, text, CHECK, failure),
        tables={name: (_COLUMNS[name], rows) for name, rows in tables.items() if rows},
    )


def _place(text: str, seen: Sighting | None, rank: int, index: int) -> tuple[object, ...]:
    what = (seen.phase, seen.region, seen.op, group_text(seen), seen.payload_bytes) if seen else [""] * 5
    return (text, rank, index, *what)


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
    """Times from the profiler's traces. The rest is that of the recorded call with the same rank and index, if any."""
    session = good.get("torch")
    if session is None:
        return []
    mine = {(s.rank, s.index): s for s in of_ledger(recorded)}
    rows: Rows = []
    first_us = min((seen.start_us for seen in session.seen), default=0.0)
    for one in time_sightings(session.folder, session.seen):
        place = mine.get((one.seen.rank, one.seen.index), one.seen)
        times = (one.seen.start_us - first_us, one.duration_us, one.overlapped_us, one.exposed_us, one.late_us)
        rows.append((*_place(text, place, place.rank, place.index), *(f"{t:.3f}" for t in times)))
    return rows


def _sessions(text: str, good: Mapping[str, Session], steps: str) -> Iterator[tuple[object, ...]]:
    for tool, session in good.items():
        for rank, measured in enumerate(session.ranks):
            seconds = spread(measured.seconds)
            times = (seconds.median, seconds.low, seconds.high, measured.watched_s)
            yield (text, tool, rank, len(measured.seconds), *(f"{t:.6f}" for t in times), measured.peak_bytes, steps)
