"""A kill matrix without a run, for the tests of `shardproof faults`, and a small subject of somebody else.

The seam is that of `suites.killing.matrix`; its rows are made by hand.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from harness.injecting.kill_matrix import Kill
from harness.subject import NamedSubject
from parallel.subject import ParallelSubject
from suites.mutants.kill_rows import Killed

OURS = "parallel.subject:subject"
INTERRUPTED = "tests.harness.toy_subjects:right"
"""The subject whose matrix somebody interrupts after two rows."""
theirs = ParallelSubject(only=("tp",))
"""A subject that claims one mode and is not the one whose source is mutated."""


class _Unspoken:
    """The same as somebody may write it who says neither what is refused nor what is harmless."""

    modes = theirs.modes
    __call__ = staticmethod(theirs.__call__)


unspoken = _Unspoken()


class Plan(NamedTuple):
    """A row that is planned."""

    row: Kill
    rows: int = 1


def kill(name: str, *killed_by: str, right: str = "", **fields: Any) -> Kill:
    """A row with the fields that a test speaks of."""
    usual = {"kind": "mutant", "stands_for": "B-01", "mode": "tp", "phase": "backward", "region": "head"}
    usual |= {"region_right": right, "cause_right": right, "equivalent": "", "seconds": 0.5}
    usual["cause_told"] = {"yes": "right", "no": "misleading"}.get(right, "")
    return Kill(name=name, killed_by=killed_by, **usual | fields)


def planned(_subject: NamedSubject, *, quick: bool, only: str = "", **_options: object) -> list[Plan]:
    """Four rows, the last one a survivor unless it must be quick; of held-back mutants two others."""
    if only == "held-back":
        rows = [kill("secret", "replicas", right="no", held_back=True), kill("d", "merge", right="yes", held_back=True)]
        return [Plan(row=row) for row in rows]
    rows = [
        kill("a", "replicas", "ledger", right="yes"),
        kill("a", "replicas", mode="msp", seconds=1.5, right="no"),
        kill("b", equivalent="nobody draws"),
    ]
    return [Plan(row=row) for row in (rows if quick else [*rows, kill("c")])]


def kills(plans: Sequence[Plan], subject: NamedSubject, *, processes: int) -> Iterator[Killed]:
    """The rows as planned."""
    for number, plan in enumerate(plans):
        if subject.name == INTERRUPTED and number == 2:
            raise KeyboardInterrupt
        unmissed = "redundant" if plan.row.equivalent else ""
        yield Killed(row=plan.row, case="tp=2", diagnosed="backward of head", unmissed=unmissed)
