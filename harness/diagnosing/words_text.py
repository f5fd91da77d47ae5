"""The line `when:` of a failure, made of what experiments found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.protocols import CaseLike

_LISTED = 12
"""Most words that a line names in a row."""
_UNDECIDED = "no other case shows it: each cannot be run or decided, fails for another reason, or changes further words"


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """A word that the failure needs: the values with which the case fails, its own first, and is right."""

    word: str
    fails: tuple[Any, ...]
    right: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededWords:
    """Results of the experiments on one failure. `case` is the plainest that fails.

    `without`: words of which some change left the failure and none made the case right. `untried`: words for which
    there was no time. `beside`: words that are not plain in `case`, and of which nothing is known.
    """

    case: CaseLike
    needed: tuple[Needed, ...]
    without: tuple[str, ...]
    untried: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The line of a failure: "only with tied=true and tp=2; right with tied=false, with tp=1"."""
        untried = f" (no time was left to try {_listed(self.untried)})" if self.untried else ""
        words = [_word_values(word, (getattr(self.case, word),)) for word in self.beside]
        beside = f" (tried beside {_listed(words)})" if words else ""
        if not self.needed and not self.without:
            return "not searched: no time left" if self.untried else _UNDECIDED
        if not self.needed:
            ranks = ", with one rank too" if self.case.world_size == 1 else ""
            others = f"{len(self.without)} words" if len(self.without) > 1 else self.without[0]
            return f"other values of {others} change nothing{ranks}{beside}{untried}"
        fails = " and ".join(_word_values(one.word, one.fails) for one in self.needed)
        right = ", ".join(f"with {_word_values(one.word, one.right)}" for one in self.needed)
        return f"only with {fails}{beside}; right {right}{untried}"


def _word_values(word: str, values: Sequence[Any]) -> str:
    """The word with these values as a case writes them: "norm=layernorm|rmsnorm"."""
    return f"{word}=" + "|".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)


def _listed(words: Sequence[str]) -> str:
    more = f" and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return ", ".join(words[:_LISTED]) + more
