"""The verdict of a check on a case, and its row in `verdicts.jsonl`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardproof.harness.verdicts import words
from shardproof.harness.verdicts.facts import Counts, Fact, FailedCheck, Note, Worst
from shardproof.harness.verdicts.stored_records import plain, record_of, row_of

_NUMBER = re.compile(r"(?<![a-z])\d+")
PASS, FAIL, UNKNOWN, SKIP = "pass", "fail", "unknown", "skip"
"""`skip` is the word of a case that the subject does not claim; no check ever answers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A check on one case. `case` is the text of the case, `check` the name of the check, `facts` what it found.

    `kind` is how calls differ ("missing"), or the class that the subject raised; "" for other checks.

    `worst` is the tensor or event closest to its limit, or furthest beyond it. `notes` are what the check left open,
    `decided` by kind of name ("grad"): how many tensors were found right or wrong, and of how many. `failure` explains
    a failed check.
    """

    case: str
    check: str
    verdict: str
    facts: tuple[Fact, ...]
    kind: str = ""
    worst: Worst | None = None
    notes: tuple[Note, ...] = ()
    decided: Mapping[str, Counts] = field(default_factory=dict)
    failure: FailedCheck | None = None

    @property
    def statement(self) -> str:
        """The facts in words."""
        return words.join_facts(self.facts)

    @property
    def site(self) -> str:
        """What failures of one bug have in common: phase and module of the first place, layers as one; else the
        statement, without its numbers.
        """
        place = self.failure.place if self.failure else None
        return _NUMBER.sub("*", " of ".join(filter(None, place)) if place else f"{self.check}: {self.statement}")

    @property
    def lines(self) -> list[str]:
        """The verdict in words, as a report shows it."""
        return words.render(self.check, self.statement, self.worst, self.failure)

    @property
    def message(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)

    def row(self) -> dict[str, Any]:
        """The verdict as an object of `verdicts.jsonl`: its fields, and its message for readers of text."""
        return {**row_of(self), "message": plain(self.message)}


def verdict_of(row: object) -> Verdict:
    """The verdict that a row holds. Raises ValueError naming the field that is wrong."""
    return record_of(Verdict, row)
