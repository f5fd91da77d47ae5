"""What findings and verdicts left open, for tests: names, reasons, and the line of experiments."""

from typing import Any

from shardproof.harness.verdicts.facts import (
    FailedCheck,
    First,
    LikelyCause,
    NoteKind,
    Where,
    Worst,
    noted_names,
    state_text,
)
from shardproof.harness.verdicts.verdict import FAIL, Verdict
from shardproof.harness.verdicts.words import when_line


def names_of(found: Any, *kinds: str) -> list[str]:
    """The names in the notes of a finding or verdict, of these kinds (values of NoteKind) or of all."""
    return noted_names(found.notes, *map(NoteKind, kinds))


def reasons_of(found: Any) -> list[str]:
    """The reasons in its notes."""
    return [note.reason for note in found.notes if note.reason]


def when_of(verdict: Any) -> str:
    """The line of experiments on a failed verdict, "" where there were none."""
    return when_line(verdict.failure.when) if verdict.failure and verdict.failure.when else ""


def failed(
    case: str, check: str, first: First, *, cause: str = "", error: float | None = None, allowed: float = 0.0
) -> Verdict:
    """A failed verdict with this first place."""
    worst = None if error is None else Worst(name="loss/0", error=error, allowed=allowed, epsilons=0.0)
    failure = FailedCheck(
        where=Where(mode="tp", world_size=2),
        repeat="shardproof run",
        first=first,
        causes=(LikelyCause(id="stated", fact=state_text(cause)),) if cause else (),
    )
    return Verdict(
        case=case, check=check, verdict=FAIL, facts=(state_text("loss/0 differs"),), worst=worst, failure=failure
    )
