"""What is stored of a proved case; small, so that another process can send it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.checking.evidence import Verdict
from harness.checking.routing_checks import load_rows
from harness.diagnosing.errors_by_place import error_rows
from harness.recording.spans import RankSpan
from harness.running.proof import CaseResult
from harness.running.store import ledger_rows
from harness.running.summary import SummaryRow, summarize


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """What is stored of a proved case. `ledger`: its lines of ledger.csv. `ran`: the ranks of `saved_bytes` when they
    are not all. `errors` are rows of errors.csv for a case that failed, `unplaced` says why there are none; `loads` are
    those of experts.csv.
    """

    text: str
    verdicts: tuple[Verdict, ...]
    verdict: str
    machine: bool
    seconds: Mapping[str, float]
    ledger: str
    rows: tuple[SummaryRow, ...]
    saved_bytes: tuple[int, ...]
    ran: tuple[int, ...]
    errors: tuple[Sequence[object], ...] = ()
    unplaced: str = ""
    traceback: str = ""
    spans: tuple[RankSpan, ...] = ()
    loads: tuple[Sequence[object], ...] = ()


def proved(result: CaseResult) -> Proved:
    """The part of a result that is stored."""
    case, evidence = result.case, result.evidence
    ran, axes = (tuple(evidence.ran), evidence.axes) if evidence else ((), case.axes)
    rows = summarize(result.text, case.mode, case.world_size, result.events, result.expectation, ran, axes)
    errors: tuple[Sequence[object], ...] = ()
    unplaced = ""
    if evidence and result.diagnosis:
        try:
            errors = tuple(error_rows(evidence, result.text, result.diagnosis.first))
        except Exception as problem:  # a strange tensor, which the verdicts report; the run goes on
            unplaced = f"{type(problem).__name__}: {problem}"
    return Proved(
        text=result.text,
        verdicts=result.verdicts,
        verdict=result.verdict,
        machine=bool(result.machine),
        seconds=dict(result.seconds),
        ledger=ledger_rows(result.events),
        rows=tuple(rows),
        saved_bytes=tuple(evidence.saved_bytes) if evidence else (),
        ran=ran,
        errors=errors,
        unplaced=unplaced,
        traceback=result.traceback,
        spans=evidence.spans if evidence else (),
        loads=tuple(load_rows(result.text, evidence)) if evidence else (),
    )
