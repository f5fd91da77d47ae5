"""Finds by experiment which words of a case a failure needs: the case is run again with words changed.

A word is needed if the failure vanishes with another value of it while all other words stay. If a rule changes other
words along with it, the word does not count if these alone remove the failure. Many words are changed at once, and then
in halves if the failure vanishes. So n words of which k are needed take about `2 k log2(n / k)` runs.

The plainest dtype is tried first, then one rank. Then the case becomes as plain as the failure allows: every word gets
its plainest value, a number the plainest that still fails. Then each word gets another value, first the words that are
not plain. Only runs of the plainest case with one word changed are stated. Nothing is stated of a change that is
refused or undecided, or that changes other words which remove the failure alone. No rule is about any bug. Source:
delta debugging (Zeller and Hildebrandt 2002, "Simplifying and Isolating Failure-Inducing Input").
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from shardproof.harness.diagnosing.tried_words import OutOfTime, combine_words
from shardproof.harness.diagnosing.words_text import Change, Needed, NeededWords, Right
from shardproof.harness.protocols import CaseLike

Fails = Callable[[CaseLike], "bool | None"]
"""Whether a case fails for the same reason; None if it cannot be run or decided, or fails for another reason.

Raises OutOfTime if the budget is spent.
"""
_REPAIRS = 4
"""The most other words that are made plain to make an illegal change legal."""


def needed_words(case: CaseLike, domains: Mapping[str, Sequence[Any]], fails: Fails) -> NeededWords:
    """The words that the failure of this case needs, as far as `fails` has time.

    `domains`: word -> the values that it may have, the plainest first. Of numbers and dtypes only plainer ones than the
    case's are tried first.
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
        self._made_of, self._made = case, dict[Change, CaseLike | Exception]()
        self._kept: Collection[str] = ()
        self._tried: set[str] = set()

    def run(self, kept: Collection[str] = ()) -> None:
        """Make all experiments, beginning with the failing case. `kept` words are not made plain by themselves."""
        self.case, self._kept = self._failed, kept
        self._tried.clear()
        plain = {word: values[0] for word, values in self._domains.items() if word not in kept}
        self.simplify_first([("dtype", plain["dtype"])] if "dtype" in plain else [])
        self.simplify_first(self.fewer_ranks())
        self.simplify([(word, value) for word, value in plain.items() if getattr(self.case, word) != value])
        if self.simplify_each():
            self.simplify_each()  # now that words are plainer, further changes may be possible
        self.decide()

    def find_contradicting_words(self) -> set[str]:
        """Words that have the failing case's value in a case that is right: another word must be needed as well.

        Also words with a right value whose value in the failing case could not be run alone, since a rule ties it to
        other words.
        """
        right = {word: self._runs(word, False) for word in self._domains}
        return {
            word
            for word, values in right.items()
            if self._own(word) in values
            or (values and self._own(word) not in (getattr(self.case, word), *self._runs(word, True)))
        }

    def fewer_ranks(self) -> list[Change]:
        """Changes that remove ranks: the plainest value of every word with which the case has fewer ranks."""
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

        Returns whether one was changed.
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
        """Find the needed words: first those that are not plain, one by one, then all others, many at once.

        A mode that is plain comes after the other words. One right value of a word shows that it is needed, so further
        values of needed words are tried at the very end: if time runs out then, no word is missing.
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
        elif left:  # illegal by themselves: other words follow
            for word, _ in left:
                self._decide_one(word)

    def _decide_one(self, word: str, *, one_is_enough: bool = False) -> None:
        """Try every other value of a word. If one is right, also try alone the words that had to change with it."""
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
        """Cases with the words that changed beside this one, each alone and all together, and with this one unchanged.

        Combinations for which a rule changes this word too are left out.
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
        """Other values of a word with which the plainest case failed (or, unless `fails`, was right)."""
        found = []
        for value in dict.fromkeys((self._own(word), *self._others(word), *self._less_plain(word))):
            with suppress(ValueError, TypeError):  # no legal case
                other = self._with(self.case, word, value)
                if value != getattr(self.case, word) and self._known.get(str(other)) is fails:
                    found.append(value)
        return found

    def _right(self, word: str) -> list[Right]:
        """Values of a word with which the case is right, unless words that changed beside it suffice for that."""
        if self._own(word) not in (getattr(self.case, word), *self._runs(word, True)):
            return []  # the failing case itself would contradict it
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
        """The values of these words with which the case fails in every combination, beginning with its own values.

        A word is left out if the failing case has none of its values.
        """
        first = {word: getattr(self.case, word) for word in words}
        found = combine_words(
            first, {word: self._runs(word, True) for word in words}, lambda words: failing(self._but(words))
        )
        return {word: values for word, values in found.items() if self._own(word) in values}

    def _but(self, words: Mapping[str, Any]) -> CaseLike | None:
        """The case with these words, and what follows from them by rule; None if it is illegal."""
        with suppress(ValueError, TypeError):
            return self.case.but(**words)
        return None

    def _case_fails(self, case: CaseLike | None, most_ranks: int = 0) -> bool | None:
        """Whether the case fails; None if it has more than `most_ranks`, and more ranks than the plainest case."""
        if case is None or case.world_size > max(most_ranks, self.case.world_size):
            return None
        text = str(case)
        if text not in self._known:
            self._known[text] = self._fails(case)
        return self._known[text]

    def _apply_changes(self, changes: Sequence[Change]) -> tuple[CaseLike, list[Change]]:
        """The case with as many of these changes as are legal together, and these changes."""
        case, made = self.case, list[Change]()
        left, before = list(changes), None
        while left != before:  # an illegal change may be legal after others
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
        """The case with another value of this word. If that is illegal, words that break a rule become plain too.

        Raises ValueError or TypeError if the case is still illegal. Cases made of `self.case` are made once, since
        checking their rules takes as long as a run does.
        """
        if case is not self.case:
            return self._make_case(case, word, value)
        if self._made_of is not case:
            self._made_of, self._made = case, {}
        if (word, value) not in self._made:
            try:
                self._made[word, value] = self._make_case(case, word, value)
            except (ValueError, TypeError) as problem:
                self._made[word, value] = problem
        made = self._made[word, value]
        if isinstance(made, Exception):
            raise made.with_traceback(None)
        return made

    def _make_case(self, case: CaseLike, word: str, value: Any) -> CaseLike:
        """What `_with` returns, made anew."""
        changed: Any = dataclasses.replace
        words = {word: value}
        for _ in range(_REPAIRS):
            try:
                found: CaseLike = changed(case, **words)
                return found
            except (ValueError, TypeError) as problem:
                key = getattr(problem, "key", "")
                if key in words or key not in self._domains:
                    changed = type(case).but  # dependent words follow, also if they are no dataclass fields
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
        """Larger values of a number, which are tried if the plainest case has no right value among the others."""
        mine, values = getattr(self.case, word), self._domains[word]
        own = word != "dtype" and _is_ordered(word, mine) and mine in values[1:]
        return tuple(values[values.index(mine) + 1 :]) if own else ()

    def result(self) -> NeededWords:
        """The words that are known so far."""
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
    """Whether only plainer values are tried, as for numbers, and for dtypes, whose wider limits may hide the error."""
    return word == "dtype" or (isinstance(value, int | float) and not isinstance(value, bool))
