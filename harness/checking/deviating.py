"""Tensors that a subject states to deviate from the truth by design: not judged, and named with what it states.

A stated deviation is a difference of numbers from the truth and of nothing else: a tensor that is not finite, or whose
shards or replicas do not merge, is wrong as ever, and every other check goes on. One that does not occur is told too.
Where the truth applies the deviation, its tensors are judged like all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from harness.checking.evidence import Evidence, Finding
from harness.checking.measures.tolerance import Measured

__all__ = ["ABSENT", "APPLIED", "STATED", "Deviating", "apart", "deviates", "not_judged", "stated_of_all"]

STATED = " (stated deviation: "
"""What stands behind an unchecked name that `subject.deviates` states, and before its sentence."""
ABSENT = "stated deviation that does not occur: "
APPLIED = "stated deviation that the truth applies: "
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Deviating:
    """The tensors of one check: those that are judged; those that deviate as stated, as the truth has them too, and
    those that are stated to and do not: name -> sentence.
    """

    judged: tuple[Measured, ...]
    stated: Mapping[str, str]
    applied: Mapping[str, str]
    absent: Mapping[str, str]

    @property
    def unchecked(self) -> list[str]:
        """The names that are not judged, each with its sentence."""
        return [f"{name}{STATED}{sentence})" for name, sentence in self.stated.items()]

    def told(self, finding: Finding) -> Finding:
        """The finding with what is stated."""
        known = {"stated deviation: ": self.stated, APPLIED: self.applied, ABSENT: self.absent}
        said = [f"{word}{words}" for word, names in known.items() for words in _by_sentence(names)]
        return replace(finding, message="; ".join([finding.message, *said])) if said else finding


def apart(evidence: Evidence, measured: Sequence[Measured]) -> Deviating:
    """The tensors of one check, those apart that deviate as the subject states."""
    known = {one.name: said for one in measured if (said := deviates(evidence, one.name))}
    judged = {name for name in known if not not_judged(evidence, name)}
    stated = {
        one.name for one in measured if one.name in known.keys() - judged and one.wrong and math.isfinite(one.error)
    }
    right = {one.name for one in measured if one.right and one.decidable}
    return Deviating(
        judged=tuple(one for one in measured if one.name not in stated),
        stated={name: known[name] for name in known if name in stated},
        applied={name: known[name] for name in known if name in judged & right},
        absent={name: known[name] for name in known if name in right - judged},
    )


def deviates(evidence: Evidence, name: str) -> str:
    """How the subject states that this tensor deviates; "" where it does not."""
    return evidence.deviates.get(_pattern(evidence, name), "")


def not_judged(evidence: Evidence, name: str) -> bool:
    """Whether this tensor deviates as stated, and the truth does not apply it."""
    return bool(pattern := _pattern(evidence, name)) and pattern not in evidence.applied


def stated_of_all(evidence: Evidence) -> list[str]:
    """What is wrong with the statement itself: it hides every tensor of the truth. [] where nothing is."""
    if not all(not_judged(evidence, name) for name in evidence.truth):
        return []
    return [f"deviates={tuple(evidence.deviates)} states every name of the truth, so it says nothing; legal: 'act/*'"]


def _pattern(evidence: Evidence, name: str) -> str:
    """The pattern that speaks of this name; one whose deviation the truth applies comes first."""
    matching = [pattern for pattern in evidence.deviates if fnmatchcase(name, pattern)]
    return next((pattern for pattern in matching if pattern in evidence.applied), next(iter(matching), ""))


def _by_sentence(stated: Mapping[str, str]) -> Iterable[str]:
    """A sentence, and the first of the tensors that it speaks of."""
    for sentence in dict.fromkeys(stated.values()):
        names = [name for name, said in stated.items() if said == sentence]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"{sentence} ({', '.join(names[:_NAMED])}{more})"
