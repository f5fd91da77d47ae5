"""Which words of a case a failure needs, found by experiment: the case is run again with words changed.

A word is needed when the failure is gone with another value of it, all other words as they are. A word that by a rule
changes others is left out when one of these removes the failure with fewer changes. Words are changed many at
once, and in halves where the failure is gone. So n words of which k are needed take about `2 k log2(n / k)` runs. First
of all comes the plainest dtype, then one rank. Then the case becomes as plain as the failure allows: every word gets
its plainest value, a number the plainest that still fails. Then each word takes another one, the words that are not
plain first. Runs of the plainest case with one word changed are stated, no others. A change that is refused or cannot
be decided states nothing. Nor does one beside other words that remove the failure alone. No rule about any bug enters.
Source: delta debugging (Zeller and Hildebrandt 2002, "Simplifying and Isolating Failure-Inducing Input").
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shardproof.harness.diagnosing.tried_words import OutOfTime, combine_words
from shardproof.harness.diagnosing.words_text import Change, Needed, NeededWords, Right
from shardproof.harness.protocols import CaseLike

Fails = Callable[[CaseLike], "bool | None"]
"""Whether a case fails for the same reason; None where it cannot be run or decided, or fails for another one.

Raises OutOfTime when the budget is spent.
"""
_REPAIRS = 4
"""Most repairs of an illegal change, each of a further word."""


def needed_words(case: CaseLike, domains: Mapping[str, Sequence[Any]], fails: Fails) -> NeededWords:
    """The words that the failure of this case needs, as far as `fails` has time.

    `domains`: word -> the values that it may take, the plainest first. Numbers and dtypes are tried with plainer ones.
    """
    search = _Search(case, domains, fails)
    with suppress(OutOfTime):
        search.run()
        if kept := search.find_contradicting_words():
            search.run(kept)
    return search.result()


class _Search:
    """The experiments on one case; `case` is the plainest that still fails."""

    def __init__(self, case: CaseLike, domains: Mapping[str, Sequence[Any]], fails: Fails) -> None:
        self.case = self._failed = case
        self._domains = domains
        self._fails = fails
        self._known: dict[str, bool | None] = {}
        self._kept: Collection[str] = ()
        self._tried: set[str] = set()

    def run(self, kept: Collection[str] = ()) -> None:
        """Make all experiments from the failing case on; words that are `kept` do not become plain by themselves."""
        self.case, self._kept = self._failed, kept
        self._tried.clear()
        plain = {word: values[0] for word, values in self._domains.items() if word not in kept}
        self.simplify_first([("dtype", plain["dtype"])] if "dtype" in plain else [])
        self.simplify_first(self.fewer_ranks())
        self.simplify([(word, value) for word, value in plain.items() if getattr(self.case, word) != value])
        if self.simplify_each():
            self.simplify_each()  # what was not legal or not wrong may be so beside plainer words
        self.decide()

    def find_contradicting_words(self) -> set[str]:
        """Words of which the plainest case is right with the value of the failing case: other words matter to it.

        And those with another value that is right, where the own one could not be run: by a rule it needs other words.
        """
        right = {word: self._runs(word, False) for word in self._domains}
        return {
            word
            for word, values in right.items()
            if self._own(word) in values
            or (values and self._own(word) not in (getattr(self.case, word), *self._runs(word, True)))
        }

    def fewer_ranks(self) -> list[Change]:
        """The changes that take ranks away, as many as there are."""
        changes = []
        for word, values in self._domains.items():
            if word in self._kept:
                continue
            with suppress(ValueError, TypeError):  # no legal case
                if self._with(self.case, word, values[0]).world_size < self.case.world_size:
                    changes.append((word, values[0]))
        return changes

    def simplify_first(self, changes: Sequence[Change]) -> None:
        """Make these changes if the case is legal and still fails."""
        changes = [(word, value) for word, value in changes if value != getattr(self.case, word)]
        other, made = self._apply_changes(changes)
        if made and self._case_fails(other):
            self.case = other

    def simplify(self, changes: Sequence[Change]) -> None:
        """Make each of these changes with which the case still fails."""
        other, made = self._apply_changes(changes)
        if made and self._case_fails(other):
            self.case = other
        elif len(made) > 1:
            half = len(made) // 2
            self.simplify(made[:half])
            self.simplify(made[half:])

    def simplify_each(self) -> bool:
        """Give every word that is not plain, one by one, the plainest value with which the case still fails.

        Return whether one was changed.
        """
        before = self.case
        for word, values in self._domains.items():
            if word in self._kept:
                continue
            mine = getattr(self.case, word)
            for value in self._others(word) if _is_ordered(word, mine) else values[:1]:
                with suppress(ValueError, TypeError):  # no legal case
                    other = self._with(self.case, word, value)
                    if value != mine and self._case_fails(other):
                        self.case = other
                        break
        return self.case is not before

    def decide(self) -> None:
        """Find the words that are needed: those that are not plain one by one, then all others many at once.

        A mode that is plain comes after these. One right value of a word shows that it is needed, so further values
        come last of all: what time ends is then a list of values, and no word is missing.
        """
        words = [word for word in self._domains if self._others(word)]
        plain = [word for word in words if getattr(self.case, word) == self._domains[word][0]]
        for word in words:
            if word not in plain:
                self._decide_one(word, one_is_enough=True)
        self._decide_many([(word, self._others(word)[0]) for word in plain if word != "mode"])
        if "mode" in plain:
            self._decide_one("mode", one_is_enough=True)
        right = [word for word in words if self._right(word)]
        for word in right:
            self._decide_one(word)
        self._combine(right, lambda case: self._case_fails(case, self._failed.world_size))

    def _decide_many(self, changes: Sequence[Change]) -> None:
        """Find the changes that make the case pass, in halves."""
        other, made = self._apply_changes(changes)
        if len(made) > 1 and self._case_fails(other):
            self._tried |= {word for word, _ in made}
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

    def _decide_one(self, word: str, *, one_is_enough: bool = False) -> None:
        """Try every other value of a word, and where one is right those words alone that had to change with it."""
        for value in dict.fromkeys((self._own(word), *self._others(word))):
            with suppress(ValueError, TypeError):  # no legal case
                other = self._with(self.case, word, value)
                found = self._case_fails(other, self._failed.world_size if value == self._own(word) else 0)
                controls = (
                    [self._case_fails(control) for control in self._controls(word, other)] if found is False else []
                )
                if one_is_enough and found is False and all(controls):
                    break
        for value in () if self._runs(word, False) else self._less_plain(word):
            with suppress(ValueError, TypeError):  # no legal case
                self._case_fails(self._with(self.case, word, value))
        self._tried.add(word)

    def _own(self, word: str) -> Any:
        return getattr(self._failed, word)

    def _controls(self, word: str, other: CaseLike) -> list[CaseLike]:
        """Cases with the words that changed beside this one, each of them and all, and with this one as it is.

        None where a rule changes them together.
        """
        along = {one: getattr(other, one) for one in sorted(self._find_differing_words(other) - {word})}
        found = []
        for changes in [*({one: value} for one, value in along.items()), along]:
            with suppress(ValueError, TypeError):  # no legal case
                control = self._with(self.case, *next(iter(changes.items()))) if len(changes) == 1 else None
                control = control or self.case.but(**changes)
                if word not in self._find_differing_words(control) != set():
                    found.append(control)
        return found

    def _runs(self, word: str, fails: bool) -> list[Any]:
        """Other values of a word with which the plainest case was run, the rest as it is, and failed or was right."""
        found = []
        for value in dict.fromkeys((self._own(word), *self._others(word), *self._less_plain(word))):
            with suppress(ValueError, TypeError):  # no legal case
                other = self._with(self.case, word, value)
                if value != getattr(self.case, word) and self._known.get(str(other)) is fails:
                    found.append(value)
        return found

    def _right(self, word: str) -> list[Right]:
        """Values of a word with which the case is right, and not for the words that changed beside it."""
        if self._own(word) not in (getattr(self.case, word), *self._runs(word, True)):
            return []  # the failing case itself would contradict
        found = []
        for value in self._runs(word, False):
            other = self._with(self.case, word, value)
            if all(self._known.get(str(control)) for control in self._controls(word, other)):
                further = sorted(self._find_differing_words(other) - {word})
                found.append(Right(value=value, further=tuple((one, getattr(other, one)) for one in further)))
        return found

    def _combine(
        self, words: Sequence[str], failing: Callable[[CaseLike | None], bool | None]
    ) -> dict[str, tuple[Any, ...]]:
        """The values of these words with which the case fails in every combination, those of the failing case first.

        A word is left out where the value that it has in the failing case is none of them.
        """
        first = {word: getattr(self.case, word) for word in words}
        found = combine_words(
            first, {word: self._runs(word, True) for word in words}, lambda words: failing(self._but(words))
        )
        return {word: values for word, values in found.items() if self._own(word) in values}

    def _but(self, words: Mapping[str, Any]) -> CaseLike | None:
        """The case with these words, and what follows from them by rule; None where it is not legal."""
        with suppress(ValueError, TypeError):
            return self.case.but(**words)
        return None

    def _case_fails(self, case: CaseLike | None, most_ranks: int = 0) -> bool | None:
        """Whether it fails; None for one of more ranks than the plainest case, unless more are allowed."""
        if case is None or case.world_size > max(most_ranks, self.case.world_size):
            return None
        text = str(case)
        if text not in self._known:
            self._known[text] = self._fails(case)
        return self._known[text]

    def _apply_changes(self, changes: Sequence[Change]) -> tuple[CaseLike, list[Change]]:
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

    def _is_tied(self, word: str) -> bool:
        """Whether no rule lets this word alone become plain."""
        with suppress(ValueError, TypeError):
            return self._find_differing_words(self.case.but(**{word: self._domains[word][0]})) != {word}
        return True

    def _find_differing_words(self, other: CaseLike) -> set[str]:
        return {word for word in self._domains if getattr(other, word) != getattr(self.case, word)}

    def _others(self, word: str) -> tuple[Any, ...]:
        mine, values = getattr(self.case, word), self._domains[word]
        if _is_ordered(word, mine) and mine in values:
            values = values[: values.index(mine)]
        return tuple(value for value in values if value != mine)

    def _less_plain(self, word: str) -> tuple[Any, ...]:
        """The values of a number behind its own, which are tried where no plainer one can be right."""
        mine, values = getattr(self.case, word), self._domains[word]
        own = word != "dtype" and _is_ordered(word, mine) and mine in values[1:]
        return tuple(values[values.index(mine) + 1 :]) if own else ()

    def result(self) -> NeededWords:
        """Words that are known now."""
        words = [word for word in self._domains if self._others(word)]
        right = {word: found for word in words if (found := self._right(word))}
        fails = self._combine(list(right), lambda case: self._known.get(str(case)))
        untried = tuple(word for word in words if word not in self._tried and word not in fails)
        plain = {word for word in words if getattr(self.case, word) == self._domains[word][0]}
        return NeededWords(
            case=self.case,
            needed=tuple(Needed(word=word, fails=fails[word], right=tuple(right[word])) for word in fails),
            left=True in self._known.values(),
            untried=untried,
            beside=tuple(word for word in words if word not in {*fails, *untried, *plain} and not self._is_tied(word)),
        )


def _is_ordered(word: str, value: Any) -> bool:
    """Whether plainer values alone are tried: of numbers, and of dtypes, whose wider limits may hide what is wrong."""
    return word == "dtype" or (isinstance(value, int | float) and not isinstance(value, bool))
