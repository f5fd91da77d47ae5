"""Many cases on one subject: proved one after another, stored as they finish. What the command line calls.

    result = run(Request(cases=parse_cases(["mode=tp tp=2"]), subject=named("parallel.subject:subject")))

Exit status: 0 all pass, 1 a check failed or could not be decided, 2 the request was wrong (RequestError, or the dense
model cannot compute one of the cases) or every case was skipped, 3 the machine failed and nothing else did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cases import in_own_words
from harness.checking.evidence import FAIL, PASS, SKIP, UNKNOWN, Verdict
from harness.errors import RequestError, ShardproofError
from harness.interpreter import interrupted_after
from harness.mesh_axes import stage_count
from harness.protocols import CaseLike, case_text
from harness.running.proof import ended_by
from harness.running.proving import REFUSED, proving
from harness.running.ranks.capacity import admitted
from harness.running.request import Request, check_saved
from harness.running.result import CaseResult, Proved, proved, with_traceback
from harness.running.store import STOPPED, Store, environment
from harness.subject import NamedSubject, Unanswered, answered, claimed, compared_with, refusal, truth_of
from harness.torch_internals.lookup import untested

if TYPE_CHECKING:
    from harness.running.sharing import ProvingProcess
    from harness.running.witnessing import Witnesses

_DRY = "dry: ranks had shapes and no numbers, so calls, bytes and their order were checked, and nothing else"
INTERRUPTED = 130  # the exit status after a Ctrl-C
Progress = Callable[[int, int, CaseLike, str], object]
"""Called after every case: how many of how many are done, the case and its verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to: its folder, all verdicts, the command's exit status, and notes on what could not be done."""

    path: Path
    verdicts: tuple[Verdict, ...]
    exit_status: int
    notes: tuple[str, ...]


def run(request: Request, on_progress: Progress = lambda *_: None) -> RunResult:
    """Prove every case and write the run folder as it goes; finished cases stay readable whatever stops the run.

    Raises RequestError before anything runs when there is no case, or when all are too large for this machine, or when
    the subject's claims, the engine or the folder are wrong. Where the dense model cannot compute one case of
    several (it diverges, its data cannot be read, it needs too much memory) the others are still proved.
    """
    cases, subject = request.cases, request.subject
    _check(request)
    results: list[Proved] = []  # but for what is stored of them
    notes: list[str] = []
    amended: Mapping[str, tuple[Verdict, ...]] = {}
    by_text = {case_text(case): case for case in cases}
    words, planned = _words(request), [_planned(case, subject) for case in cases]
    with _processes(request) as others, nullcontext() if others else proving(request) as prove_case:
        store = Store(request.out, subject.name, environment(request.command, words))

        def keep(found: Proved) -> bool:
            case = by_text[found.text]
            result = with_traceback(found, store) if found.traceback else found
            _keep(store, result)
            results.append(replace(result, ledger="", rows=(), errors=(), spans=(), loads=()))
            on_progress(len(results), len(cases), case, result.verdict)
            return not request.fail_fast or result.verdict in (PASS, SKIP)

        def ended(number: int, error: ShardproofError) -> Proved:
            return proved(ended_by(cases[number], subject.name, error, request.options))

        try:
            store.plan(planned)
            seen = _witnesses(request, cases, store) if request.profile else None
            if prove_case is None:
                from harness.running.sharing import Sharing, together  # noqa: PLC0415

                start = partial(_started, request)
                sharing = Sharing(cases=cases, processes=others, keep=keep, ended=ended, start=start)
                sharing.prove_all(together(cases))
                notes += sharing.notes
            else:
                for case in cases:
                    result = prove_case(case)
                    found = proved(_witnessed(result, subject, seen, store) if seen else result)
                    with interrupted_after():
                        if not keep(found):
                            break
            if failed := [result for result in results if result.verdict == FAIL]:
                amended = _with_words(failed, by_text, request, store, apart=prove_case is None)
        finally:
            store.close()
    if request.page is not None:
        request.page(store.path)
    return RunResult(
        path=store.path,
        verdicts=tuple(v for result in results for v in amended.get(result.text, result.verdicts)),
        exit_status=INTERRUPTED if STOPPED in store.notes else _exit_status(results),
        notes=(*store.notes, *_notes(request, seen), *notes, *_not_run(request, len(results))),
    )


def _with_words(
    failed: Sequence[Proved], by_text: Mapping[str, CaseLike], request: Request, store: Store, *, apart: bool
) -> Mapping[str, tuple[Verdict, ...]]:
    """The verdicts of failed cases by the text of the case, with the line `when:`."""
    from harness.running.experiments import Failed, look_for_words  # noqa: PLC0415

    failures = [Failed(case=by_text[result.text], verdicts=result.verdicts) for result in failed]
    return look_for_words(failures, request, proving, store, apart=apart)


def _notes(request: Request, seen: Witnesses | None) -> Iterator[str]:
    """What this version of torch, the engine, the truth and the witnesses do not show."""
    yield from filter(None, [untested()])
    yield from [_DRY] if request.engine == "dry" else _truth_note(request.subject)
    yield from seen.notes if seen else ()


def _check(request: Request) -> None:
    if not request.cases:
        raise RequestError("cases=(): at least one case is needed; legal: mode=tp tp=2")
    check_saved(request.cases)
    admitted(request.cases, request.engine)
    claimed(request.subject)


def _not_run(request: Request, done: int) -> list[str]:
    left = len(request.cases) - done
    return [f"--fail-fast: {left} of {len(request.cases)} cases were not run"] if left else []


@contextmanager
def _processes(request: Request) -> Iterator[list[ProvingProcess]]:
    """The processes of a request; none where this one proves its cases, as where it cannot be forked."""
    forks = 0 if request.engine == "torchrun" or request.profile else request.processes
    ours: list[ProvingProcess] = []
    try:
        for _ in range(forks if request.engine == "inproc" else min(forks, 1)):
            process = _started(request)
            ours += [process] if process else []
        yield ours
    finally:
        for process in ours:  # a later one has the earlier ones' connections too
            process.connection.close()
        for process in ours:
            process.close()


def _started(request: Request) -> ProvingProcess | None:
    from harness.running.forked_process import forked  # noqa: PLC0415
    from harness.running.sharing import ProvingProcess, serve  # noqa: PLC0415

    process = forked(lambda connection: serve(connection, replace(request, page=None), proving))
    return None if process is None else ProvingProcess(process, request)


def _witnesses(request: Request, cases: Sequence[CaseLike], store: Store) -> Witnesses:
    """The sessions of all cases that the subject takes."""
    from harness.running.witnessing import witnesses  # noqa: PLC0415

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


def _witnessed(result: CaseResult, subject: NamedSubject, seen: Witnesses, store: Store) -> CaseResult:
    """The result with the witnesses' verdict, their tables stored."""
    if result.skipped:
        return result
    found: Any = subject.call
    expected = found.expected if result.expectation is not None else None
    told = seen.told(result.case, result.events, result.expectation, expected)
    for name, (columns, rows) in told.tables.items():
        store.extend(name, columns, rows)
    diagnoses = {**result.diagnoses, **({told.verdict.check: told.diagnosis} if told.diagnosis else {})}
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
    row |= {"words": case.words()} if in_own_words(case) else {}  # nobody else can read its text
    if stage_count(case.axes) > 1:
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
        from harness.diagnosing.errors_by_place import ERROR_COLUMNS  # noqa: PLC0415

        store.extend("errors.csv", ERROR_COLUMNS, result.errors)
    if result.spans:
        from harness.recording.spans import SPAN_COLUMNS, span_row  # noqa: PLC0415

        store.extend("spans.csv", SPAN_COLUMNS, (span_row(result.text, span) for span in result.spans))
    if result.loads:
        from harness.checking.routing_checks import LOAD_COLUMNS  # noqa: PLC0415

        store.extend("experts.csv", LOAD_COLUMNS, result.loads)
    if result.unplaced:
        store.notes.append(f"errors.csv lacks {result.text!r}: {result.unplaced}")
    store.add(result.text, result.ledger, result.rows, result.verdicts, result.seconds, result.saved_bytes, result.ran)


def _exit_status(results: Sequence[Proved]) -> int:
    """A failed check outweighs a failed machine: it is a fact about the subject, whatever else went wrong."""
    if any(result.verdict in (FAIL, UNKNOWN) and not result.machine for result in results):
        return 1
    if any(result.machine for result in results):
        return 3
    refused = any((v.check, v.verdict) == (REFUSED, SKIP) for result in results for v in result.verdicts)
    return 2 if refused or all(result.verdict == SKIP for result in results) else 0
