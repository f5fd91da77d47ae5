"""Many cases on one subject: proved one after another, stored as they finish. What the command line calls.

    result = run(Request(cases=parse_cases(["mode=tp tp=2"]), subject=named("parallel.subject:subject")))

Exit status: 0 all pass, 1 a check failed or could not be decided, 2 the request was wrong (RequestError, or the dense
model cannot compute one of the cases) or every case was skipped, 3 the machine failed and nothing else did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.checking.evidence import FAIL, SKIP, UNKNOWN, Verdict
from harness.diagnosing.errors_by_place import ERROR_COLUMNS
from harness.engines.named import engine_named
from harness.errors import RequestError
from harness.protocols import CaseLike, case_text
from harness.recording.spans import SPAN_COLUMNS, span_row
from harness.running.environment import environment
from harness.running.experiments import Failed, examined
from harness.running.order import together
from harness.running.proof import CaseResult, prove, with_traceback
from harness.running.ranks.capacity import admit
from harness.running.request import Request
from harness.running.second_process import Proved, SecondProcess, prove_all, proved
from harness.running.spare_process import Spare
from harness.running.store import Store
from harness.running.truth.kept import Truths
from harness.running.truth.own_truth import compared_with
from harness.running.witnessing import CHECK, Witnesses, witnesses
from harness.subject import NamedSubject, Unanswered, answered, claimed, refusal, truth_of
from harness.torch_internals.lookup import untested
from harness.torch_internals.memory import keep_freed_memory

__all__ = [
    "INTERRUPTED",
    "Progress",
    "RunResult",
    "run",
]

_DRY = "dry: ranks had shapes and no numbers, so calls, bytes and their order were checked, and nothing else"
_AT_ONCE = (
    "inproc-concurrent: its ranks share the global random streams, the default dtype and the state of modules; what "
    "fails here and passes with --engine inproc depends on one of them"
)
_EXPERIMENTS = ("inproc", "pool", "dry")
"""Engines on which other cases than those of the request can be run."""
_STOPPED = "interrupted while the words that failures need were looked for: their lines `when:` are missing"
INTERRUPTED = 130
"""The exit status after a Ctrl-C."""
_REFUSED = "truth"
"""The check of a case that the dense model cannot compute, among others that it can."""
Progress = Callable[[int, int, CaseLike, str], object]
"""Called after every case: how many of how many are done, the case and its verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to: its folder, all verdicts, the command's exit status, and notes on what could not be done."""

    path: Path
    verdicts: tuple[Verdict, ...]
    exit_status: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tally:
    """What is remembered of a stored case."""

    case: CaseLike
    verdicts: tuple[Verdict, ...]
    verdict: str
    machine: bool


def run(request: Request, on_progress: Progress = lambda *_: None, *, spare: Spare | None = None) -> RunResult:
    """Prove every case and write the run folder as it goes; finished cases stay readable whatever stops the run.

    `spare` is the second process, if it was started before.

    Raises RequestError before anything runs when there is no case, or when a case is too large for this machine, or
    when the subject's claims, the engine or the folder are wrong. Where the dense model cannot compute one case of
    several (it diverges, its data cannot be read) the others are still proved.
    """
    cases, subject = request.cases, request.subject
    if not cases:
        raise RequestError("cases=(): at least one case is needed; legal: mode=tp tp=2")
    admit(cases, request.engine)
    claimed(subject)
    results: list[_Tally] = []
    by_text = {case_text(case): case for case in cases}
    with proving(request) as prove_case, _beside(request, spare) as second:
        store = Store(request.out, subject.name, environment(request.command, _words(request)))

        def prove_here(number: int) -> Proved:
            return proved(_witnessed(prove_case(cases[number]), subject, seen, store))

        def keep(found: Proved) -> None:
            result = replace(found, verdicts=with_traceback(found.verdicts, found.text, found.traceback, store))
            _keep(store, result)
            case = by_text[result.text]
            tally = _Tally(case=case, verdicts=result.verdicts, verdict=result.verdict, machine=result.machine)
            results.append(tally)
            on_progress(len(results), len(cases), case, result.verdict)

        try:
            store.plan(_planned(case, subject) for case in cases)
            seen = _witnesses(request, cases, store)
            prove_all(cases, prove_here, keep, second, together(cases))
            if request.engine in _EXPERIMENTS:
                with _until_interrupted(store):
                    results = _with_experiments(results, subject, partial(prove_case, explain=False), store)
        finally:
            store.close()
    if request.page is not None:
        request.page(store.path)
    return RunResult(
        path=store.path,
        verdicts=tuple(verdict for result in results for verdict in result.verdicts),
        exit_status=INTERRUPTED if _STOPPED in store.notes else _exit_status(results),
        notes=(
            *store.notes,
            *filter(None, [untested()]),
            *([_DRY] if request.engine == "dry" else _truth_note(subject)),
            *([_AT_ONCE] if request.engine == "inproc-concurrent" and _exit_status(results) == 1 else []),
            *(seen.notes if seen else ()),
            *([second.note] if second and second.note else []),
        ),
    )


@contextmanager
def proving(request: Request) -> Iterator[Callable[..., CaseResult]]:
    """What proves one case after another as the request says, in both processes; `how` are other words of `prove`.

    One of several that the dense model cannot compute is skipped, so that the others are kept; one alone raises
    RequestError.
    """
    truths = Truths()
    keep_freed_memory()
    with engine_named(request.engine) as engine:

        def prove_case(case: CaseLike, **how: Any) -> CaseResult:
            usual = {"timeout_s": request.timeout_s, "options": request.options, "truths": truths}
            try:
                return prove(case, request.subject, engine, device=request.device, **{**usual, **how})
            except RequestError as problem:
                if len(request.cases) == 1 or how:
                    raise
                return _refused(case, str(problem))

        yield prove_case


@contextmanager
def _until_interrupted(store: Store) -> Iterator[None]:
    """Experiments, which a Ctrl-C ends: every verdict is there, so the run is reported whole."""
    try:
        yield
    except KeyboardInterrupt:
        store.notes.append(_STOPPED)


def _with_experiments(
    results: Sequence[_Tally], subject: NamedSubject, prove_case: Callable[..., CaseResult], store: Store
) -> list[_Tally]:
    """The results with the line `when:` of failed ones, stored."""
    failures = [Failed(case=one.case, verdicts=one.verdicts) for one in results if one.verdict == FAIL]
    found = examined(failures, subject, prove_case)
    if found:
        store.amend(found)
    return [replace(one, verdicts=found.get(case_text(one.case), one.verdicts)) for one in results]


def _refused(case: CaseLike, why: str) -> CaseResult:
    text = case_text(case)
    skip = Verdict(case=text, check=_REFUSED, verdict=SKIP, worst=None, message=why)
    return CaseResult(case=case, text=text, verdicts=(skip,), skipped=why)


@contextmanager
def _beside(request: Request, spare: Spare | None) -> Iterator[SecondProcess | None]:
    """The second process of a request, when it may have one: an engine whose ranks are threads, and no profiler."""
    if request.processes < 2 or request.engine != "inproc" or request.profile:
        yield None
        return
    with closing(SecondProcess(replace(request, page=None), spare)) as second:
        yield second


def _witnesses(request: Request, cases: Sequence[CaseLike], store: Store) -> Witnesses | None:
    """The sessions of all cases that the subject takes, None when no witness was requested."""
    if not request.profile:
        return None
    taken = [case for case in cases if _takes(case, request.subject)]
    folder = store.path / "traces"
    return witnesses(
        taken,
        request.subject.address,
        request.profile,
        folder,
        device=request.device,
        timeout_s=request.timeout_s,
        steps=request.profile_steps,
        options=request.options,
    )


def _takes(case: CaseLike, subject: NamedSubject) -> bool:
    """Whether the subject takes the case; one that raises then is not run, and its verdict gives the error."""
    try:
        return not refusal(case, subject)
    except Unanswered:
        return False


def _witnessed(result: CaseResult, subject: NamedSubject, seen: Witnesses | None, store: Store) -> CaseResult:
    """The result with the witnesses' verdict, their tables stored."""
    if seen is None or result.skipped:
        return result
    found: Any = subject.call
    expected = found.expected if result.expectation is not None else None
    told = seen.told(result.case, result.events, result.expectation, expected)
    for name, (columns, rows) in told.tables.items():
        store.extend(name, columns, rows)
    diagnoses = {**result.diagnoses, **({CHECK: told.diagnosis} if told.diagnosis else {})}
    return replace(result, verdicts=(*result.verdicts, told.verdict), diagnoses=diagnoses)


def _truth_note(subject: NamedSubject) -> list[str]:
    """What the subject was compared with, where that is not our decoder."""
    truth = truth_of(subject)
    return [] if truth is None else [f"compared with {compared_with(truth)}"]


def _words(request: Request) -> dict[str, object]:
    how = {"engine": request.engine, "device": request.device, "timeout_s": request.timeout_s}
    how |= {"truth": compared_with(truth_of(request.subject))}
    return {"subject": request.subject.name, **how, "cases": len(request.cases)}


def _planned(case: CaseLike, subject: NamedSubject) -> dict[str, object]:
    """The row of `cases.jsonl`: the text and what reports need of it without parsing, of a pipeline its bubble too."""
    row: dict[str, object] = {"case": case_text(case), "mode": case.mode, "world_size": case.world_size}
    row |= {"dtype": case.dtype, "micro": case.micro, "steps": case.steps}
    if len(case.axes.get("pp", ((0,),))[0]) > 1:
        with suppress(Unanswered):  # only pages show it
            row |= answered("pipeline", lambda: _bubble(case, subject))
    tokens = getattr(case, "tokens", None)
    return row if tokens is None else {**row, "tokens": tokens}


def _bubble(case: CaseLike, subject: NamedSubject) -> dict[str, float]:
    pipeline = getattr(subject.call, "pipeline", None)
    stated = None if pipeline is None else pipeline(case).bubble_stated
    return {} if stated is None else {"bubble_stated": float(stated)}


def _keep(store: Store, result: Proved) -> None:
    if result.errors:
        store.extend("errors.csv", ERROR_COLUMNS, result.errors)
    if result.spans:
        store.extend("spans.csv", SPAN_COLUMNS, (span_row(result.text, span) for span in result.spans))
    if result.unplaced:
        store.notes.append(f"errors.csv lacks {result.text!r}: {result.unplaced}")
    store.add(result.text, result.ledger, result.rows, result.verdicts, result.seconds, result.saved_bytes, result.ran)


def _exit_status(results: Sequence[_Tally]) -> int:
    """A failed check outweighs a failed machine: it is a fact about the subject, whatever else went wrong."""
    if any(result.verdict in (FAIL, UNKNOWN) and not result.machine for result in results):
        return 1
    if any(result.machine for result in results):
        return 3
    refused = any(verdict.check == _REFUSED for result in results for verdict in result.verdicts)
    return 2 if refused or all(result.verdict == SKIP for result in results) else 0
