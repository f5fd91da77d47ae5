"""The results of a run as they come, stored and reported, and their sums: verdicts, exit status, and notes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardproof.harness.protocols import CaseLike
from shardproof.harness.running.request import Request
from shardproof.harness.running.result import REFUSED, StoredCase, with_traceback
from shardproof.harness.running.store import STOPPED, Store
from shardproof.harness.subject import compared_with, truth_of
from shardproof.harness.torch_internals.lookup import untested_note
from shardproof.harness.verdicts.verdict import FAIL, PASS, SKIP, UNKNOWN, Verdict

_DRY = "dry: ranks had shapes and no numbers, so calls, bytes and their order were checked, and nothing else"
INTERRUPTED = 130  # the exit status after a Ctrl-C


Progress = Callable[[int, int, CaseLike, str], object]
"""Called after every case with the number of finished cases, the number of all, the case and its verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The results so far, without their stored parts. `cases` are all cases of the run by their text."""

    store: Store
    cases: Mapping[str, CaseLike]
    total: int
    on_progress: Progress
    fail_fast: bool
    results: list[StoredCase] = field(default_factory=list)

    def keep(self, case: StoredCase) -> bool:
        """Store a result and report it. Returns whether to go on."""
        done = len(self.results) + 1
        try:
            result = self._store_case(case)
            self.results.append(replace(result, ledger="", rows=(), tables=()))
        finally:  # also if the disk is full: its verdict is known
            self.on_progress(done, self.total, self.cases[case.text], case.verdict)
        return not self.fail_fast or result.verdict in (PASS, SKIP)

    def _store_case(self, case: StoredCase) -> StoredCase:
        store, result = self.store, with_traceback(case, self.store) if case.traceback else case
        for file, columns, rows in result.tables:
            store.extend(file, columns, rows)
        if result.unplaced:
            store.notes.append(f"errors.csv lacks {result.text!r}: {result.unplaced}")
        store.add(
            result.text, result.ledger, result.rows, result.verdicts, result.seconds, result.saved_bytes, result.ran
        )
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run: its folder, all verdicts, the command's exit status, and notes on what was not possible."""

    path: Path
    verdicts: tuple[Verdict, ...]
    exit_status: int
    notes: tuple[str, ...]


def run_result(
    request: Request,
    store: Store,
    results: Sequence[StoredCase],
    amended: Mapping[str, tuple[Verdict, ...]],
    witnessed: Sequence[str],
    shared: Sequence[str],
) -> RunResult:
    """The result of a run with these results of its cases. `amended` are verdicts that changed since, by the text of
    the case; `witnessed` and `shared` are notes of the witnesses and of the processes.
    """
    truth, left = truth_of(request.subject), len(request.cases) - len(results)
    compared = _DRY if request.engine == "dry" else f"compared with {compared_with(truth)}" if truth else ""
    once = 0 if request.engine == "dry" else sum(not request.repeats(case) for case in request.cases)
    repeated = f"determinism and recording: {once} cases were run once; alone, each is run twice" if once else ""
    not_run = f"--fail-fast: {left} of {len(request.cases)} cases were not run" if left else ""
    return RunResult(
        path=store.path,
        verdicts=tuple(v for result in results for v in amended.get(result.text, result.verdicts)),
        exit_status=INTERRUPTED if STOPPED in store.notes else _exit_status(results),
        notes=tuple(filter(None, (*store.notes, untested_note(), compared, *witnessed, *shared, repeated, not_run))),
    )


def _exit_status(results: Sequence[StoredCase]) -> int:
    """A failed check outweighs a failed machine, since it is a fact about the subject."""
    if any(result.verdict in (FAIL, UNKNOWN) and not result.machine for result in results):
        return 1
    if any(result.machine for result in results):
        return 3
    refused = any((v.check, v.verdict) == (REFUSED, SKIP) for result in results for v in result.verdicts)
    return 2 if refused or all(result.verdict == SKIP for result in results) else 0
