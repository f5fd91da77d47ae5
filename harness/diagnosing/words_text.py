"""The line `when:` of a failure, made of what experiments found: a list of statements, each of which is one run.

    only with tp=2|4 and zero=1, perhaps act=relu; right with tp=1, with zero=0 (tried on 'tp=2 zero=1 act=relu')

The case behind `tried on` fails, as the words behind it say, and with each value of `only with` in the place of its
own. With the words of one `with` behind it the case is right.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardproof.harness.protocols import CaseLike, case_text

_LISTED = 12
"""Most words that a line names in a row."""
UNDECIDED = "no other case shows it: each cannot be run or decided, fails for another reason, or changes further words"
REFUTED = "nothing that is so again: the plainest case did not fail in this way when it was run once more"
NOT_RUN_AGAIN = "nothing that was run twice: no time left"
NO_TIME = "not searched: no time left"
Change = tuple[str, Any]
"""A word and the value that it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """A value with which the case is right, the words that change with it, and checks that fail for another reason."""

    value: Any
    further: tuple[Change, ...] = ()
    but_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """A word that the failure needs: the values with which the case fails, its own first, and is right."""

    word: str
    fails: tuple[Any, ...]
    right: tuple[Right, ...]

    @property
    def texts(self) -> list[str]:
        """The words behind each `with` of `right`: values with nothing beside them as one."""
        alone = [one.value for one in self.right if not one.further and not one.but_for]
        rest = [one for one in self.right if one.further or one.but_for]
        found = [_word_values(self.word, alone)] if alone else []
        return found + [
            changes_text([(self.word, one.value), *one.further])
            + (f" but for {'|'.join(one.but_for)}" if one.but_for else "")
            for one in rest
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededWords:
    """Results of the experiments on one failure. `case` is the plainest that fails.

    `left`: whether some change left the failure. `untried`: words for which there was no time. `beside`: words that are
    not plain in `case`, and of which nothing is known. `unproved`: why it cannot be stated.
    """

    case: CaseLike
    needed: tuple[Needed, ...]
    left: bool
    untried: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    unproved: str = ""

    @property
    def text(self) -> str:
        """The line of a failure: "only with tied=true and tp=2; right with tied=false, with tp=1 (tried on 'tp=2')"."""
        untried = f" (no time was left to try {_listed(self.untried)})" if self.untried else ""
        if self.unproved:
            return self.unproved
        if not self.needed and not self.left:
            return NO_TIME if self.untried else UNDECIDED
        perhaps = [changes_text([(word, getattr(self.case, word))]) for word in self.beside]
        beside = f", perhaps {_listed(perhaps)}" if perhaps else ""
        on = f"{case_text(self.case)!r}"
        if not self.needed:
            ranks = ", on one rank" if self.case.world_size == 1 else ""
            return f"no word is known to be needed{beside}; {on} fails{ranks}{untried}"
        fails = " and ".join(_word_values(one.word, one.fails) for one in self.needed)
        right = ", ".join(f"with {text}" for one in self.needed for text in one.texts)
        return f"only with {fails}{beside}; right {right} (tried on {on}){untried}"

    @property
    def failing(self) -> Iterator[tuple[Change, ...]]:
        """The changes of the case that `only with` states, the case itself first: every combination of the values."""
        for values in itertools.product(*(one.fails for one in self.needed)):
            changes = zip([one.word for one in self.needed], values, strict=True)
            yield tuple((word, value) for word, value in changes if value != getattr(self.case, word))


def changes_text(changes: Sequence[Change]) -> str:
    """These words as a case writes them: "zero=1 tied=false"."""
    return " ".join(_word_values(word, (value,)) for word, value in changes)


def _word_values(word: str, values: Sequence[Any]) -> str:
    """The word with these values: "norm=layernorm|rmsnorm"."""
    return f"{word}=" + "|".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return ", ".join(words[:_LISTED]) + more
