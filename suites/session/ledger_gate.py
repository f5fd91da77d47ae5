"""Ledgers as gates: the events of a case are those of its stored ledger, or the test fails with the difference.

A ledger is one CSV file for each case, as readable in a pull request as any baseline (reports.comparing.snapshot). For
subjects without a closed form it is the only statement of their calls; for ours a diff shows the effect of a change.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest

from shardproof.harness.engines.engine import Engine
from shardproof.harness.ledger import COLUMNS
from shardproof.harness.protocols import CaseLike
from shardproof.harness.running import store
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.subject import NamedSubject, refusal
from shardproof.reports.comparing.compared_tables import events_table
from shardproof.reports.comparing.differences import find_changes, fold_changes
from shardproof.reports.comparing.snapshot import count_events, read_events, write_events
from shardproof.reports.printing.text import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerGate:
    """Compares the cases of a subject with the ledgers of a folder, or writes them with `update`."""

    folder: Path
    subject: NamedSubject
    engine: Engine
    update: bool = False
    timeout_s: float = 60.0

    def holds(self, case: CaseLike) -> None:
        """Compare what a case sends with its stored ledger; skip a case that the subject refuses.

        Raises AssertionError with the difference, RequestError for a stored ledger that cannot be read.
        """
        if reason := refusal(case, self.subject):
            pytest.skip(reason)
        events = self._events(case)
        path = self.folder / file_of(str(case))
        if self.update:
            write_events(events, path)
            return
        if not path.is_file():
            raise AssertionError(f"{path}: no ledger is stored for {case}; store it with --update-ledgers")
        found = fold_changes(find_changes(read_events(path), events))
        if len(found):
            table = plain(events_table(found))
            raise AssertionError(f"{case} sends something else than {path}:\n{table}if it should: --update-ledgers")

    def _events(self, case: CaseLike) -> pd.DataFrame:
        run = execute(
            case, self.subject.call, self.engine, text=str(case), name=self.subject.address, timeout_s=self.timeout_s
        )
        rows = [[getattr(event, name) for name in COLUMNS] for event in run.events]
        return count_events(pd.DataFrame(rows, columns=list(COLUMNS)))


def file_of(case: str) -> str:
    """The file of a case."""
    return store.file_of(case, "csv")
