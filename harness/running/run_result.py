"""What a run came to: verdicts, exit status, and notes on what it does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.checking.evidence import FAIL, SKIP, UNKNOWN, Verdict
from harness.running.proving import REFUSED
from harness.running.request import Request
from harness.running.result import Proved
from harness.running.store import STOPPED, Store
from harness.subject import NamedSubject, compared_with, truth_of
from harness.torch_internals.lookup import untested

_DRY = "dry: ranks had shapes and no numbers, so calls, bytes and their order were checked, and nothing else"
INTERRUPTED = 130  # the exit status after a Ctrl-C


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to: its folder, all verdicts, the command's exit status, and notes on what could not be done."""

    path: Path
    verdicts: tuple[Verdict, ...]
    exit_status: int
    notes: tuple[str, ...]


def run_result(
    request: Request,
    store: Store,
    results: Sequence[Proved],
    amended: Mapping[str, tuple[Verdict, ...]],
    witnessed: Sequence[str],
    shared: Sequence[str],
) -> RunResult:
    """The result of a run whose cases came to these. `amended` are verdicts that changed since, by the text of the
    case; `witnessed` and `shared` are notes of the witnesses and of the processes.
    """
    notes = (*store.notes, *_notes(request), *witnessed, *shared, *_not_run(request, len(results)))
    return RunResult(
        path=store.path,
        verdicts=tuple(v for result in results for v in amended.get(result.text, result.verdicts)),
        exit_status=INTERRUPTED if STOPPED in store.notes else _exit_status(results),
        notes=notes,
    )


def _notes(request: Request) -> Iterator[str]:
    """What this version of torch, the engine and the truth do not show."""
    yield from filter(None, [untested()])
    yield from [_DRY] if request.engine == "dry" else _truth_note(request.subject)


def _truth_note(subject: NamedSubject) -> list[str]:
    """What the subject was compared with, where that is not our decoder."""
    truth = truth_of(subject)
    return [] if truth is None else [f"compared with {compared_with(truth)}"]


def _not_run(request: Request, done: int) -> list[str]:
    left = len(request.cases) - done
    return [f"--fail-fast: {left} of {len(request.cases)} cases were not run"] if left else []


def _exit_status(results: Sequence[Proved]) -> int:
    """A failed check outweighs a failed machine: it is a fact about the subject, whatever else went wrong."""
    if any(result.verdict in (FAIL, UNKNOWN) and not result.machine for result in results):
        return 1
    if any(result.machine for result in results):
        return 3
    refused = any((v.check, v.verdict) == (REFUSED, SKIP) for result in results for v in result.verdicts)
    return 2 if refused or all(result.verdict == SKIP for result in results) else 0
