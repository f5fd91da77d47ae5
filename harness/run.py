"""Many cases on one subject: proved one after another, stored as they finish. What the command line calls.

    result = run(Request(cases=("mode=tp tp=2",), subject="parallel.subject:subject"), tell)

Exit status: 0 all pass, 1 a check failed or could not be decided, 2 the request was wrong (RequestError) or every case
was skipped, 3 the machine failed and nothing else did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.asking import Unanswered
from harness.capacity import admit
from harness.claims import claimed
from harness.diagnosis import case_text
from harness.engines.engine import Engine
from harness.environment import environment
from harness.errors import RequestError
from harness.evidence import FAIL, SKIP, UNKNOWN, Verdict
from harness.proof import CaseResult, prove, skip_reason
from harness.protocols import CaseLike, Subject
from harness.resolve import resolve
from harness.store import Store
from harness.summary import summarize
from harness.witnesses.witnessing import CHECK, Witnesses, witnesses

__all__ = ["CASE", "ENGINES", "Progress", "Request", "RunResult", "engine_named", "known_engine", "parse_cases", "run"]

CASE = "reference.case:Case"
ENGINES = {
    "inproc": "harness.engines.inproc:InprocEngine",
    "pool": "harness.engines.pool:PoolEngine",
    "inproc-concurrent": "harness.engines.concurrent:ConcurrentEngine",
    "torchrun": "harness.engines.torchrun:TorchrunEngine",
    "dry": "harness.engines.dry:DryEngine",
}
"""Word of the command line -> the engine's class, resolved only when asked for."""

_DRY = "dry: ranks had shapes and no numbers, so calls, bytes and their order were checked, and nothing else"

Progress = Callable[[int, int, str, str], object]
"""Told after every case: how many of how many are done, the case's text and its verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to run. `page`, when given, writes `report.html` into the finished folder; `command` goes to env.json.

    `profile` names the tools under which every case is run once more as a witness of its ledger: torch, nsys. They
    watch `profile_steps` of that run, None for all.
    """

    cases: tuple[str, ...]
    subject: str
    engine: str = "inproc"
    device: str = "cpu"
    out: Path = Path("runs")
    timeout_s: float = 60.0
    command: tuple[str, ...] = ()
    page: Callable[[Path], object] | None = None
    profile: tuple[str, ...] = ()
    profile_steps: range | None = None

    @property
    def options(self) -> str:
        """The words beside case and subject that repeat a case as it was run here."""
        words = {"--engine": (self.engine, "inproc"), "--device": (self.device, "cpu")}
        return " ".join(f"{word} {value}" for word, (value, usual) in words.items() if value != usual)


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

    verdicts: tuple[Verdict, ...]
    verdict: str
    machine: bool


def run(request: Request, on_progress: Progress = lambda *_: None) -> RunResult:
    """Prove every case and write the run folder as it goes; finished cases stay readable whatever stops the run.

    Raises RequestError before anything runs when a case, the subject, the engine or the folder is wrong.
    """
    cases = parse_cases(request.cases)
    admit(cases, request.engine)
    claimed(resolve(request.subject), request.subject)
    results: list[_Tally] = []
    with engine_named(request.engine) as engine:
        store = Store(request.out, request.subject, environment(request.command, _words(request)))
        try:
            store.plan(_planned(case) for case in cases)
            seen = _witnesses(request, cases, store)
            for case in cases:
                result = prove(
                    case,
                    request.subject,
                    engine,
                    device=request.device,
                    timeout_s=request.timeout_s,
                    options=request.options,
                )
                result = _witnessed(result, request.subject, seen, store)
                _keep(store, result)
                results.append(_Tally(verdicts=result.verdicts, verdict=result.verdict, machine=bool(result.machine)))
                on_progress(len(results), len(cases), result.text, result.verdict)
        finally:
            store.close()
    if request.page is not None:
        request.page(store.path)
    return RunResult(
        path=store.path,
        verdicts=tuple(verdict for result in results for verdict in result.verdicts),
        exit_status=_exit_status(results),
        notes=(*store.notes, *([_DRY] if request.engine == "dry" else []), *(seen.notes if seen else ())),
    )


def _witnesses(request: Request, cases: Sequence[CaseLike], store: Store) -> Witnesses | None:
    """The sessions of all cases that the subject takes, None when no witness was asked for."""
    if not request.profile:
        return None
    subject: Any = resolve(request.subject)
    taken = [case for case in cases if _takes(case, subject, request.subject)]
    folder = store.path / "traces"
    return witnesses(
        taken,
        request.subject,
        request.profile,
        folder,
        device=request.device,
        timeout_s=request.timeout_s,
        steps=request.profile_steps,
        options=request.options,
    )


def _takes(case: CaseLike, subject: Subject, name: str) -> bool:
    """Whether the subject takes the case; one that cannot tell is not run, and its verdict says so."""
    try:
        return not skip_reason(case, subject, name)
    except Unanswered:
        return False


def _witnessed(result: CaseResult, subject: str, seen: Witnesses | None, store: Store) -> CaseResult:
    """The result with the witnesses' verdict, their tables stored."""
    if seen is None or result.skipped:
        return result
    found: Any = resolve(subject)
    expected = found.expected if result.expectation is not None else None
    told = seen.told(result.case, result.events, result.expectation, expected)
    for name, (columns, rows) in told.tables.items():
        store.extend(name, columns, rows)
    diagnoses = {**result.diagnoses, **({CHECK: told.diagnosis} if told.diagnosis else {})}
    return replace(result, verdicts=(*result.verdicts, told.verdict), diagnoses=diagnoses)


def parse_cases(texts: Sequence[str]) -> list[CaseLike]:
    """The cases of these texts, each once. Raises RequestError for the first text that is no case, or for none."""
    if not texts:
        raise RequestError("cases=(): at least one case is needed; legal: mode=tp tp=2")
    parse: Callable[[str], Any] = getattr(resolve(CASE), "parse")  # noqa: B009  (the harness knows no Case)
    cases: dict[str, CaseLike] = {}
    for text in texts:
        try:
            case = parse(text)
        except ValueError as problem:
            raise RequestError(f"case {text!r}: {problem}") from problem
        cases.setdefault(case_text(case), case)
    return list(cases.values())


def known_engine(name: str) -> str:
    """Where the engine of this word is. Raises RequestError for an unknown word."""
    if name not in ENGINES:
        raise RequestError(f"engine={name}: is not a known engine; legal: {' '.join(ENGINES)}")
    return ENGINES[name]


def engine_named(name: str) -> Engine:
    """A fresh engine by its word on the command line; a context manager. Raises RequestError for an unknown word."""
    make: Any = resolve(known_engine(name))
    engine: Engine = make()
    return engine


def _words(request: Request) -> dict[str, object]:
    return {
        "subject": request.subject,
        "engine": request.engine,
        "device": request.device,
        "timeout_s": request.timeout_s,
        "cases": len(request.cases),
    }


def _planned(case: CaseLike) -> dict[str, object]:
    """The row of `cases.jsonl`: the text and what reports need of it without parsing."""
    row: dict[str, object] = {"case": case_text(case), "mode": case.mode, "world_size": case.world_size}
    row |= {"dtype": case.dtype, "micro": case.micro, "steps": case.steps}
    tokens = getattr(case, "tokens", None)
    return row if tokens is None else {**row, "tokens": tokens}


def _keep(store: Store, result: CaseResult) -> None:
    case, evidence = result.case, result.evidence
    saved_bytes, ran = (evidence.saved_bytes, evidence.ran) if evidence else ((), ())
    rows = summarize(result.text, case.mode, case.world_size, result.events, result.expectation, ran)
    store.add(result.text, result.events, rows, result.verdicts, result.seconds, saved_bytes, ran)


def _exit_status(results: Sequence[_Tally]) -> int:
    """A failed check outweighs a failed machine: it is a fact about the subject, whatever else went wrong."""
    if any(result.verdict in (FAIL, UNKNOWN) and not result.machine for result in results):
        return 1
    if any(result.machine for result in results):
        return 3
    return 2 if all(result.verdict == SKIP for result in results) else 0
