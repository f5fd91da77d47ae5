"""Tensors that a subject states to deviate from the truth by design: not judged, and named with what it states.

A stated deviation is a difference of numbers from the truth and of nothing else. A tensor that is not finite, or whose
shards or replicas do not merge, is wrong as ever, and every other check goes on. A deviation that does not occur is
reported too. Where the truth applies the deviation, its tensors are judged like all others.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shardproof.harness.checking.measures.measured import STATED, Measured

ABSENT = "stated deviation that does not occur: "
APPLIED = "stated deviation that the truth applies: "
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Deviations:
    """Statements of a subject: pattern of names -> sentence; `applied` are patterns whose deviation the truth has."""

    sentences: Mapping[str, str] = field(default_factory=dict)
    applied: frozenset[str] = frozenset()

    def sentence(self, name: str) -> str:
        """How this tensor deviates; "" where it is not stated to."""
        return self.sentences.get(self._pattern(name), "")

    def unjudged(self, name: str) -> bool:
        """Whether this tensor deviates, and the truth does not apply it."""
        return bool(pattern := self._pattern(name)) and pattern not in self.applied

    def problems(self, names: Iterable[str]) -> list[str]:
        """Problems of the statement itself: it hides every one of these names. [] where there are none."""
        if not all(map(self.unjudged, names)):
            return []
        return [f"deviates={tuple(self.sentences)} states every name of the truth, so it says nothing; legal: 'act/*'"]

    def apart(self, measured: Sequence[Measured]) -> tuple[list[Measured], list[str], list[str]]:
        """The tensors of one check that are judged, and names of the others, each with its sentence.

        Then a note for every statement, with the first of the tensors that it speaks of.
        """
        known = {each.name: sentence for each in measured if (sentence := self.sentence(each.name))}
        free = {name for name in known if self.unjudged(name)}
        stated = {each.name for each in measured if each.name in free and each.wrong and math.isfinite(each.error)}
        right = {each.name for each in measured if each.right and each.decidable}
        groups = {STATED.removeprefix(" ("): stated, APPLIED: right - free, ABSENT: right & free}
        return (
            [each for each in measured if each.name not in stated],
            [f"{name}{STATED}{known[name]})" for name in known if name in stated],
            [
                f"{word}{sentence}"
                for word, names in groups.items()
                for sentence in _by_sentence({name: known[name] for name in known if name in names})
            ],
        )

    def _pattern(self, name: str) -> str:
        """The pattern that speaks of this name; one whose deviation the truth applies comes first."""
        matching = [pattern for pattern in self.sentences if fnmatchcase(name, pattern)]
        return next((pattern for pattern in matching if pattern in self.applied), next(iter(matching), ""))


def _by_sentence(stated: Mapping[str, str]) -> Iterator[str]:
    for sentence in dict.fromkeys(stated.values()):
        names = [name for name, its in stated.items() if its == sentence]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"{sentence} ({', '.join(names[:_NAMED])}{more})"
