"""The result of a case: all that is known of it, and the part that is stored or sent to another process."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.records import Evidence
from shardproof.harness.checking.routing_checks import LOAD_COLUMNS, load_rows
from shardproof.harness.diagnosing.errors_by_place import ERROR_COLUMNS, error_rows
from shardproof.harness.ledger import COLUMNS, Event
from shardproof.harness.protocols import CaseLike, TermLike
from shardproof.harness.recording.spans import SPAN_COLUMNS, span_row
from shardproof.harness.run_folder import csv_text
from shardproof.harness.running.store import Store
from shardproof.harness.running.summary import SummaryRow, summarize
from shardproof.harness.verdicts.facts import FailedCheck
from shardproof.harness.verdicts.verdict import FAIL, PASS, SKIP, UNKNOWN, Verdict

if TYPE_CHECKING:
    from shardproof.harness.diagnosing.diagnosis import Diagnosis

_Result = TypeVar("_Result", "CaseResult", "StoredCase")
_ROW = operator.attrgetter(*COLUMNS)
REFUSED = "truth"
"""The check of a case that is skipped because the dense model cannot compute it."""
_Table = tuple[str, Sequence[str], Sequence[Sequence[object]]]


def verdict_on(finding: Finding, case: str, check: str, failure: FailedCheck | None = None) -> Verdict:
    """The verdict of a check on a case: the check's finding, and the explanation of a failure if there is one."""
    return Verdict(
        case=case,
        check=check,
        verdict=finding.verdict,
        facts=finding.facts,
        kind=finding.kind,
        worst=finding.worst,
        notes=finding.notes,
        decided=finding.decided,
        failure=failure,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Everything known of one case. `skipped` says why it was not run, `machine` why the machine could not finish it.

    `evidence` is None unless all runs finished. `traceback` is that of the rank that raised, uncut. `diagnoses` has one
    for each failed check, in the order of the checks; "run" stands for a case that ended without an outcome. `seconds`
    has parts: truth, control, recorded, plain, again, checks, regrouped, documents, explained, located, elsewhere.
    """

    case: CaseLike
    text: str
    verdicts: tuple[Verdict, ...]
    evidence: Evidence | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""
    machine: str = ""
    traceback: str = ""
    diagnoses: "Mapping[str, Diagnosis]" = field(default_factory=dict)

    @property
    def diagnosis(self) -> "Diagnosis | None":
        """The explanation of the first failed check, with the causes of all failed checks; None if none failed."""
        diagnoses = list(self.diagnoses.values())
        causes = dict.fromkeys(cause for diagnosis in diagnoses for cause in diagnosis.causes)
        return replace(diagnoses[0], causes=tuple(causes)) if diagnoses else None

    @property
    def events(self) -> tuple[Event, ...]:
        """The ledger of the recorded run."""
        return self.evidence.run.calls.events if self.evidence else ()

    @property
    def expectation(self) -> tuple[TermLike, ...] | None:
        """The closed form with which the ledger was compared."""
        return self.evidence.claims.expectation if self.evidence else None

    @property
    def verdict(self) -> str:
        """The worst of all verdicts; a case without any is unknown."""
        words = {verdict.verdict for verdict in self.verdicts}
        return next((word for word in (FAIL, UNKNOWN, SKIP, PASS) if word in words), UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCase:
    """The stored parts of a proved case. `ledger`: its lines of ledger.csv.

    `saved_bytes` has a number for each of the ranks `ran`, or for every rank if that is empty. `tables` are files that
    only some cases have: name, columns and rows. `unplaced` says why a failed case has no errors.csv.
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
    tables: tuple[_Table, ...] = ()
    unplaced: str = ""
    traceback: str = ""


def stored_part(result: CaseResult) -> StoredCase:
    """The part of a result that is stored."""
    case, evidence = result.case, result.evidence
    ran, axes = (tuple(evidence.run.calls.ran), evidence.claims.axes) if evidence else ((), case.axes)
    events, verdict, ledger = result.events, result.verdict, ledger_rows(result.events)
    tables, unplaced = list[_Table](), ""
    if evidence and result.diagnosis:
        try:
            errors = error_rows(evidence.run, evidence.truth, result.text, result.diagnosis.first)
            tables.append(("errors.csv", ERROR_COLUMNS, errors))
        except Exception as problem:  # a tensor that the verdicts report as broken; the run goes on
            unplaced = f"{type(problem).__name__}: {problem}"
    if evidence and evidence.run.calls.spans:
        tables.append(("spans.csv", SPAN_COLUMNS, [span_row(result.text, span) for span in evidence.run.calls.spans]))
    if evidence and any(kind_of(name) == "routing" for name in evidence.run.tensors):
        tables.append(("experts.csv", LOAD_COLUMNS, list(load_rows(result.text, evidence.run))))
    rows = summarize(result.text, case.mode, case.world_size, events, result.expectation, ran, axes)
    return StoredCase(
        text=result.text,
        verdicts=result.verdicts,
        verdict=verdict,
        machine=bool(result.machine),
        seconds=dict(result.seconds),
        ledger=ledger,
        rows=tuple(rows),
        saved_bytes=tuple(evidence.run.calls.saved_bytes) if evidence else (),
        ran=ran,
        tables=tuple(table for table in tables if table[2]),
        unplaced=unplaced,
        traceback=result.traceback,
    )


def ledger_rows(events: Iterable[Event]) -> str:
    """The events as lines of ledger.csv."""
    return csv_text(map(_ROW, events))


def with_traceback(result: _Result, store: Store) -> _Result:
    """The result of a case with its traceback stored in a file that its verdicts name."""
    file = store.attach("tracebacks", result.text, result.traceback)

    def file_traceback(verdict: Verdict) -> Verdict:
        failure = verdict.failure
        if failure is None or failure.end is None:
            return verdict
        return replace(verdict, failure=replace(failure, end=replace(failure.end, traceback=file)))

    return replace(result, verdicts=tuple(map(file_traceback, result.verdicts)))
