"""One rank's part of the run folder, `ranks/<rank>/`, written as the program runs, so that a killed one leaves it.

ledger.csv   the contract's columns, and needs_gradient (harness.ledger.Call); where a call_index comes twice, the later
             row holds: what followed settled it
steps.csv    step, start_us (its first forward), updated_us (its last optimizer step ended), microbatches
groups.csv   axis, ranks: the groups in which this rank called, in the order in which they were first seen
rank.json    rank, host, pid, clock (ranks of one clock have comparable times)
end.json     written at an orderly end: calls, doubts, peak bytes of the process, what the recorder failed at
last.json    where the rank stood when nothing had happened for long, or at its end (harness.hangs)

Rows go to the system at once: nothing waits in a buffer of the process. `cases.jsonl` and `env.json` of the run folder
are written by whichever rank is first.
"""

from __future__ import annotations

import csv
import io
import json
import operator
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from harness.ledger import COLUMNS, Event

MODE = "program"
"""The mode of a recorded program in the ledger."""
STEP_COLUMNS = ("step", "start_us", "updated_us", "microbatches")
GROUP_COLUMNS = ("axis", "ranks")
_COLUMNS = (*COLUMNS, "needs_gradient")
_ROW = operator.attrgetter(*_COLUMNS)


class Part:
    """The open files of one rank. Raises FileExistsError when another process has recorded as this rank already."""

    def __init__(self, folder: Path, rank: int, about: Mapping[str, object]) -> None:
        self.path = folder / "ranks" / str(rank)
        self.path.mkdir(parents=True)
        self.replace("rank.json", {"rank": rank, **about})
        self._ledger = self._table("ledger.csv", _COLUMNS)
        self._steps = self._table("steps.csv", STEP_COLUMNS)
        self._groups = self._table("groups.csv", GROUP_COLUMNS)
        self._known: set[tuple[str, tuple[int, ...]]] = set()

    def event(self, event: Event) -> None:
        """Append an event."""
        group = event.axis, event.group
        if group not in self._known:
            self._known.add(group)
            os.write(self._groups, _line((event.axis, " ".join(map(str, event.group)))))
        os.write(self._ledger, _line(_ROW(event)))

    def step(self, row: Sequence[object]) -> None:
        """Append a step: the values of STEP_COLUMNS."""
        os.write(self._steps, _line(row))

    def replace(self, name: str, content: Mapping[str, object]) -> None:
        """Write a JSON file of this rank, all of it or nothing."""
        half = self.path / f"{name}.part"
        half.write_text(json.dumps(content) + "\n", encoding="utf-8")
        half.replace(self.path / name)

    def remove(self, name: str) -> None:
        """Remove a file of this rank, if it is there."""
        (self.path / name).unlink(missing_ok=True)

    def _table(self, name: str, columns: Sequence[str]) -> int:
        opened = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(opened, _line(columns))
        return opened


def shared_file(path: Path, text: str) -> None:
    """Write a file of the run folder unless another rank has: what is there is always complete."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".part-", encoding="utf-8", delete=False) as file:
        file.write(text)
    try:
        with suppress(FileExistsError):
            os.link(file.name, path)
    finally:
        os.unlink(file.name)


def _line(row: Sequence[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(row)
    return text.getvalue().encode()
