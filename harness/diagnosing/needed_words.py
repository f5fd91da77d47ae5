"""Which words of a case a failure needs, found by experiment: the case is run again with words changed.

A word is needed when the failure is gone with another value of it, all other words as they are. A word that by a rule
changes others is left out when one of these removes the failure with fewer changes. Words are changed many at
once, and in halves where the failure is gone. So n words of which k are needed take about `2 k log2(n / k)` runs. First
of all comes the plainest dtype, then one rank. Then the case becomes as plain as the failure allows: every word gets
its plainest value, a number the plainest that still fails. Then each word takes another one, the words that are not
plain first. No rule about any bug enters. Source: delta debugging (Zeller and Hildebrandt 2002, "Simplifying and
Isolating Failure-Inducing Input").
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from harness.protocols import CaseLike

Fails = Callable[[CaseLike], "bool | None"]
"""Whether a case fails for the same reason; None where it cannot be run or decided, or fails for another one.

Raises OutOfTime when the budget is spent.
"""
Change = tuple[str, Any]
"""A word and the value that it gets."""
_LISTED = 12
"""Most untried words that a line names."""
_REPAIRS = 4
"""Most repairs of an illegal change, each of a further word."""
_UNDECIDED = "no other case shows it: each cannot be run or decided, or fails for another reason"


class OutOfTime(Exception):
    """No further case can be run."""


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
    there was no time.
    """

    case: CaseLike
    needed: tuple[Needed, ...]
    without: tuple[str, ...]
    untried: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The line of a failure: "only with tied=true and tp=2; right with tied=false, with tp=1"."""
        more = f" and {len(self.untried) - _LISTED} more" if len(self.untried) > _LISTED else ""
        untried = f" (no time was left to try {', '.join(self.untried[:_LISTED])}{more})" if self.untried else ""
        if not self.needed and not self.without:
            return "not searched: no time left" if self.untried else _UNDECIDED
        if not self.needed:
            ranks = ", with one rank too" if self.case.world_size == 1 else ""
            words = f"{len(self.without)} words" if len(self.without) > 1 else self.without[0]
            return f"other values of {words} change nothing{ranks}{untried}"
        fails = " and ".join(_word_values(one.word, one.fails) for one in self.needed)
        right = ", ".join(f"with {_word_values(one.word, one.right)}" for one in self.needed)
        return f"only with {fails}; right {right}{untried}"


def needed_words(case: CaseLike, domains: Mapping[str, Sequence[Any]], fails: Fails) -> NeededWords:
    """The words that the failure of this case needs, as far as `fails` has time.

    `domains`: word -> the values that it may take, the plainest first. Numbers and dtypes are tried with plainer ones.
    """
    search = _Search(case, domains, fails)
    with suppress(OutOfTime):
        search.simplify_first([("dtype", domains["dtype"][0])] if "dtype" in domains else [])
        search.simplify_first(search.fewer_ranks())
        search.simplify([(word, values[0]) for word, values in domains.items() if getattr(case, word) != values[0]])
        search.simplify_each()
        search.decide()
    return search.result()


class _Search:
    """The experiments on one case; `case` is the plainest that still fails."""

    def __init__(self, case: CaseLike, domains: Mapping[str, Sequence[Any]], fails: Fails) -> None:
        self.case = case
        self._domains = domains
        self._fails = fails
        self._known: dict[str, bool | None] = {}
        self._right: dict[str, list[Any]] = {}
        self._wrong: dict[str, list[Any]] = {}
        self._along: dict[str, set[str]] = {}
        """Word -> those that had to change with it."""
        self._tried: set[str] = set()
        self._left: set[str] = set()
        """Words with another value of which the failure is still there."""
        self._first: dict[str, Any] = {}
        """Word -> the value with which the case is right, of changes that came first."""

    def fewer_ranks(self) -> list[Change]:
        """The changes that take ranks away, as many as there are."""
        changes = []
        for word, values in self._domains.items():
            with suppress(ValueError, TypeError):  # no legal case
                if self._with(self.case, word, values[0]).world_size < self.case.world_size:
                    changes.append((word, values[0]))
        return changes

    def simplify_first(self, changes: Sequence[Change]) -> None:
        """Make these changes if the case is legal and still fails; else note that a single one makes it right."""
        changes = [(word, value) for word, value in changes if value != getattr(self.case, word)]
        other, made = self._changed(changes)
        found = self._failing(other) if made else None
        if found:
            self._left |= {word for word, _ in made}
            self.case = other
        elif found is False and len(made) == 1:
            self._first |= dict(made)

    def simplify(self, changes: Sequence[Change]) -> None:
        """Make each of these changes with which the case still fails."""
        other, made = self._changed(changes)
        if made and self._failing(other):
            self._left |= {word for word, _ in made}
            self.case = other
        elif len(made) > 1:
            half = len(made) // 2
            self.simplify(made[:half])
            self.simplify(made[half:])

    def simplify_each(self) -> None:
        """Give every word that is not plain, one by one, the plainest value with which the case still fails."""
        for word, values in self._domains.items():
            mine = getattr(self.case, word)
            for value in self._others(word) if _is_ordered(word, mine) else values[:1]:
                with suppress(ValueError, TypeError):  # no legal case
                    other = self._with(self.case, word, value)
                    if value != mine and self._failing(other):
                        self._wrong.setdefault(word, []).append(mine)
                        self._left.add(word)
                        self.case = other
                        break

    def decide(self) -> None:
        """Find the words that are needed: those that are not plain one by one, then all others many at once.

        A mode that is plain comes last: each of the others is tried.
        """
        words = [word for word in self._domains if self._others(word)]
        plain = [word for word in words if getattr(self.case, word) == self._domains[word][0]]
        for word in words:
            if word not in plain:
                self._decide_one(word)
        self._decide_many([(word, self._others(word)[0]) for word in plain if word != "mode"])
        if "mode" in plain:
            self._decide_one("mode")

    def _decide_many(self, changes: Sequence[Change]) -> None:
        """Find the changes that make the case pass, in halves."""
        other, made = self._changed(changes)
        if len(made) > 1 and self._failing(other):
            self._tried |= {word for word, _ in made}
            self._left |= {word for word, _ in made}
        elif len(made) > 1:
            half = len(made) // 2
            self._decide_many(made[:half])
            self._decide_many(made[half:])
        elif made:
            self._decide_one(made[0][0])
        left = [change for change in changes if change not in made]
        if made and left:  # changes that were illegal beside others
            self._decide_many(left)
        elif left:  # illegal one by one: other words follow
            for word, _ in left:
                self._decide_one(word)

    def _decide_one(self, word: str) -> None:
        """Try every other value of a word."""
        for value in self._others(word):
            with suppress(ValueError, TypeError):  # no legal case
                other = self._with(self.case, word, value)
                if (found := self._failing(other)) is not None:
                    (self._wrong if found else self._right).setdefault(word, []).append(value)
                    self._left |= {word} if found else set()
                    self._along[word] = self._along.get(word, set()) | self._differing(other) - {word}
        self._tried.add(word)

    def _failing(self, case: CaseLike) -> bool | None:
        text = str(case)
        if text not in self._known:
            self._known[text] = self._fails(case) if case.world_size <= self.case.world_size else None
        return self._known[text]

    def _changed(self, changes: Sequence[Change]) -> tuple[CaseLike, list[Change]]:
        """The case with as many of these changes as are legal together, and the changes made."""
        case, made = self.case, list[Change]()
        left, before = list(changes), None
        while left != before:  # what was illegal may be legal beside the others
            before, left = left, []
            for word, value in before:
                try:
                    case = self._with(case, word, value)
                except (ValueError, TypeError):
                    left.append((word, value))
                else:
                    made.append((word, value))
        return case, made

    def _with(self, case: CaseLike, word: str, value: Any) -> CaseLike:
        """The case with another value of this word alone; where that is illegal, what breaks a rule becomes plain too.

        Raises the ValueError or TypeError of a case that is still illegal then.
        """
        changed: Any = dataclasses.replace
        words = {word: value}
        for _ in range(_REPAIRS):
            try:
                found: CaseLike = changed(case, **words)
                return found
            except (ValueError, TypeError) as problem:
                key = getattr(problem, "key", "")
                if key in words or key not in self._domains:
                    changed = type(case).but  # dependent words follow; also for words that are no dataclass fields
                else:
                    words[key] = self._domains[key][0]
        return case.but(**words)

    def _implied(self, word: str) -> bool:
        """Whether a word that changed with this one is right with fewer others changed: the case needs that word."""
        along = self._along[word]
        return any(other in self._right and len(self._along[other]) < len(along) for other in along)

    def _differing(self, other: CaseLike) -> set[str]:
        return {word for word in self._domains if getattr(other, word) != getattr(self.case, word)}

    def _others(self, word: str) -> tuple[Any, ...]:
        mine, values = getattr(self.case, word), self._domains[word]
        if _is_ordered(word, mine) and mine in values:
            values = values[: values.index(mine)]
        return tuple(value for value in values if value != mine)

    def result(self) -> NeededWords:
        """Words that are known now."""
        words = [word for word in self._domains if self._others(word)]
        early = {word: [value] for word, value in self._first.items() if word not in self._tried}
        right = {**early, **self._right}
        needed = [word for word in words if word in right and (word in early or not self._implied(word))]
        return NeededWords(
            case=self.case,
            needed=tuple(
                Needed(
                    word=word, fails=(getattr(self.case, word), *self._wrong.get(word, ())), right=tuple(right[word])
                )
                for word in needed
            ),
            without=tuple(word for word in self._domains if word in self._left and word not in right),
            untried=tuple(word for word in words if word not in self._tried and word not in right),
        )


def _is_ordered(word: str, value: Any) -> bool:
    """Whether plainer values alone are tried: of numbers, and of dtypes, whose wider limits may hide what is wrong."""
    return word == "dtype" or (isinstance(value, int | float) and not isinstance(value, bool))


def _word_values(word: str, values: Sequence[Any]) -> str:
    """The word with these values as a case writes them: "norm=layernorm|rmsnorm"."""
    return f"{word}=" + "|".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
