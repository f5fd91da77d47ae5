"""The results of the experiments on a failure: which words it needs, and the record of them. Each statement is a run.

The plainest case that fails also fails with each value that a needed word has in `fails`. With the words of any one
`right` it is right.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.harness.protocols import CaseLike, case_text
from shardproof.harness.verdicts.facts import RightWith, When, WhenKind

Change = tuple[str, Any]
"""A word and its new value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """A value with which the case is right, the words that change with it, and checks that fail for another reason."""

    value: Any
    further: tuple[Change, ...] = ()
    but_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """A word that the failure needs: values with which the case fails, its own first, and with which it passes."""

    word: str
    fails: tuple[Any, ...]
    right: tuple[Right, ...]

    @property
    def right_with(self) -> list[RightWith]:
        """The words with which the case is right; values without further words are joined."""
        alone = [one.value for one in self.right if not one.further and not one.but_for]
        rest = [one for one in self.right if one.further or one.but_for]
        found = [RightWith(words=_word_values(self.word, alone))] if alone else []
        return found + [
            RightWith(words=changes_text([(self.word, one.value), *one.further]), but_for=one.but_for) for one in rest
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededWords:
    """The results of the experiments on one failure. `case` is the plainest case that fails.

    `left`: whether the failure survived some change. `untried`: words for which there was no time. `beside`: words that
    are not plain in `case`, and of which nothing is known. `unproved`: why nothing can be stated.
    """

    case: CaseLike
    needed: tuple[Needed, ...]
    left: bool
    untried: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    unproved: WhenKind | None = None

    @property
    def when(self) -> When:
        """The record of these results."""
        kind = self.unproved
        if kind is None and not self.needed and not self.left:
            kind = WhenKind.NOT_SEARCHED if self.untried else WhenKind.UNDECIDED
        return When(
            kind=kind or (WhenKind.NEEDED if self.needed else WhenKind.NONE_NEEDED),
            case=case_text(self.case),
            ranks=self.case.world_size,
            fails=tuple(_word_values(one.word, one.fails) for one in self.needed),
            right=tuple(right for one in self.needed for right in one.right_with),
            perhaps=tuple(changes_text([(word, getattr(self.case, word))]) for word in self.beside),
            untried=self.untried,
        )

    @property
    def failing(self) -> Iterator[tuple[Change, ...]]:
        """The cases that `fails with` states, as changes of the case: every combination of values, first no change."""
        for values in itertools.product(*(one.fails for one in self.needed)):
            changes = zip([one.word for one in self.needed], values, strict=True)
            yield tuple((word, value) for word, value in changes if value != getattr(self.case, word))


def changes_text(changes: Sequence[Change]) -> str:
    """These words as a case writes them: "zero=1 tied=false"."""
    return " ".join(_word_values(word, (value,)) for word, value in changes)


def _word_values(word: str, values: Sequence[Any]) -> str:
    """The word with these values: "norm=layernorm|rmsnorm"."""
    return f"{word}=" + "|".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
