"""The results of a run as they come: stored, counted and told, in the order of the cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from harness.checking.evidence import PASS, SKIP
from harness.protocols import CaseLike
from harness.running.result import Proved, with_traceback
from harness.running.store import Store

Progress = Callable[[int, int, CaseLike, str], object]
"""Called after every case: how many of how many are done, the case and its verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The results so far, but for what is stored of them. `cases` by their text are all cases of the run."""

    store: Store
    cases: Mapping[str, CaseLike]
    on_progress: Progress
    fail_fast: bool
    results: list[Proved] = field(default_factory=list)

    def keep(self, proved: Proved) -> bool:
        """Store a result and tell that it is there; whether to go on."""
        result = with_traceback(proved, self.store) if proved.traceback else proved
        _stored(self.store, result)
        self.results.append(replace(result, ledger="", rows=(), errors=(), spans=(), loads=()))
        self.on_progress(len(self.results), len(self.cases), self.cases[result.text], result.verdict)
        return not self.fail_fast or result.verdict in (PASS, SKIP)


def _stored(store: Store, result: Proved) -> None:
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
