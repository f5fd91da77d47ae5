"""Tensors that a subject states to deviate from the truth by design: they are not judged, but listed with its reason.

A stated deviation is a difference of numbers from the truth and nothing else. A tensor that is not finite, or whose
shards or replicas do not merge, is still wrong, and all other checks go on. A deviation that does not occur is reported
too. If the truth applies the deviation, its tensors are judged like all others.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from shardproof.harness.checking.measures.measured import Measured
from shardproof.harness.verdicts.facts import Fact, Note, NoteKind, state_fact


@dataclass(frozen=True, slots=True)
class Deviations:
    """A subject's statements: pattern of names -> sentence. The truth has the deviations of the `applied` patterns."""

    sentences: Mapping[str, str] = field(default_factory=dict)
    applied: frozenset[str] = frozenset()

    def sentence(self, name: str) -> str:
        """The sentence on how this tensor deviates; "" without one."""
        return self.sentences.get(self._pattern(name), "")

    def deviates_unapplied(self, name: str) -> bool:
        """Whether this tensor deviates, and the truth does not apply the deviation."""
        return bool(pattern := self._pattern(name)) and pattern not in self.applied

    def problems(self, names: Iterable[str]) -> list[Fact]:
        """The fact that the statements hide every one of these names from comparison; [] if they do not."""
        if not all(map(self.deviates_unapplied, names)):
            return []
        return [state_fact("deviates_all", patterns=[*self.sentences])]

    def apart(self, measured: Sequence[Measured]) -> tuple[list[Measured], tuple[Note, ...]]:
        """The tensors of one check that are judged, and one note for each sentence on the others, or on statements that
        do not apply.
        """
        known = {each.name: sentence for each in measured if (sentence := self.sentence(each.name))}
        free = {name for name in known if self.deviates_unapplied(name)}
        stated = {each.name for each in measured if each.name in free and each.wrong and math.isfinite(each.error)}
        right = {each.name for each in measured if each.right and each.decidable}
        groups = {
            NoteKind.DEVIATES: stated,
            NoteKind.DEVIATION_APPLIED: right - free,
            NoteKind.DEVIATION_ABSENT: right & free,
        }
        return (
            [each for each in measured if each.name not in stated],
            tuple(note for kind, names in groups.items() for note in notes_on(kind, known, names)),
        )

    def _pattern(self, name: str) -> str:
        """The pattern that matches this name; one whose deviation the truth applies comes first."""
        matching = [pattern for pattern in self.sentences if fnmatchcase(name, pattern)]
        return next((pattern for pattern in matching if pattern in self.applied), next(iter(matching), ""))


def notes_on(kind: NoteKind, sentences: Mapping[str, str], names: Iterable[str]) -> Iterator[Note]:
    """A note of this kind for each sentence, with the names for which it is stated."""
    wanted = set(names)
    for sentence in dict.fromkeys(sentences[name] for name in sentences if name in wanted):
        own = tuple(name for name in sentences if name in wanted and sentences[name] == sentence)
        yield Note(kind=kind, names=own, reason=sentence)
