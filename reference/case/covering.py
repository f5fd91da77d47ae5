"""Cases that hold every pair of values that a legal case can hold: a covering array under the rules of the language.

    covering(starts, {"tp": (1, 2), "packed": (False, True), ...}, taken)

A level is a word with one of its values. The next case is built around the pair whose levels lack most others: a start
or an earlier case is given both, words that rules object to are changed as the rules propose, and then single words are
changed as long as the case covers more. A pair that no legal case is found for is left out. Sources: AETG (Cohen et al.
1997) for the greedy choice; the repair is ours.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice, permutations
from typing import Any

from reference.case.case import Case, CaseError
from reference.case.rules import write

__all__ = ["covering"]

Words = dict[str, Any]
_REPAIRS = 8
"""How many words a rule may have changed before a case is given up."""
_BUILT = 2
"""From how many legal cases with the wanted pair the best is taken."""
_SIZES = frozenset({"seq", "vocab", "hidden", "layers"})
"""Words that take any number that a rule proposes."""
_SOURCES = 6
"""In how many cases it is looked for."""


def covering(
    starts: Sequence[Case],
    domains: Mapping[str, Sequence[Any]],
    taken: Callable[[Case], bool] = lambda case: True,
    about: Iterable[str] = (),
) -> list[Case]:
    """As few cases as the search finds that hold every pair of values of two words of `domains`, where one can.

    `starts`: legal cases to begin with, whose other words stay as they are. `taken`: which cases may be in the list.
    `about`: words of which each pair has one, where that is all that is wanted. The list is the same every time.
    """
    search = _Search(domains, taken)
    search.start(starts, set(about) or set(domains))
    found: list[Words] = []
    while pair := search.next_pair():
        if words := search.built(pair, found):
            search.cover(words)
            found.append(words)
        else:
            search.leave_out(pair)
    return [Case(**words) for words in search.spread(found)]


class _Search:
    """Which pairs are not covered yet: for every level the others, as bits of a number."""

    def __init__(self, domains: Mapping[str, Sequence[Any]], taken: Callable[[Case], bool]) -> None:
        self._domains, self._taken = domains, taken
        self._levels = [(word, value) for word, values in domains.items() for value in values]
        self._number = {level: number for number, level in enumerate(self._levels)}
        self._missing = [0] * len(self._levels)
        self._seeds: list[list[Words]] = []
        self._starts: list[Words] = []
        self._problems: dict[tuple[Any, ...], str | CaseError] = {}
        self._order = random.Random(0)

    def start(self, starts: Sequence[Case], about: set[str]) -> None:
        """Find cases that have each level alone; all pairs of levels that a case has are missing."""
        for level in self._levels:
            enabled = (self._enabled(_words(case), dict([level])) for case in starts)
            self._seeds.append([words for words in enabled if words])
        self._starts = [_words(case) for case in starts]
        for a, (word, _) in enumerate(self._levels):
            for b, (other, _) in enumerate(self._levels):
                wanted = word != other and (word in about or other in about)
                if wanted and self._seeds[a] and self._seeds[b]:
                    self._missing[a] |= 1 << b

    def next_pair(self) -> tuple[int, int] | None:
        """The missing pair whose levels lack most others, None when all are covered."""
        lacks = [missing.bit_count() for missing in self._missing]
        first = max(range(len(lacks)), key=lacks.__getitem__)
        if not lacks[first]:
            return None
        others = [number for number in range(len(lacks)) if self._missing[first] >> number & 1]
        return first, max(others, key=lacks.__getitem__)

    def built(self, pair: tuple[int, int], found: Sequence[Words]) -> Words | None:
        """A legal case with this pair that covers much besides, None when none is found."""
        fixed = dict(self._levels[number] for number in pair)
        near = (words for words in found if any(words[word] == value for word, value in fixed.items()))
        both = ({**words, **self._enablers(other)} for words, other in zip(*map(self._seeds.__getitem__, pair)))
        sources = islice(chain(both, self._seeds[pair[0]][:2], self._seeds[pair[1]][:2], near), _SOURCES)
        legal = islice(filter(None, (self._repaired(words, fixed) for words in sources)), _BUILT)
        return max((self._improved(words, fixed) for words in legal), key=self._gain, default=None)

    def _enablers(self, words: Words) -> Words:
        """What differs from the start that this seed is nearest to: its level, and words that it needs."""
        start = min(self._starts, key=lambda start: sum(start[word] != words[word] for word in words))
        return {word: value for word, value in words.items() if value != start[word]}

    def cover(self, words: Words) -> None:
        """The pairs of this case are missing no longer."""
        numbers, bits = self._held(words)
        for number in numbers:
            self._missing[number] &= ~bits

    def leave_out(self, pair: tuple[int, int]) -> None:
        """No case has this pair."""
        for one, other in (pair, pair[::-1]):
            self._missing[one] &= ~(1 << other)

    def spread(self, found: Sequence[Words]) -> list[Words]:
        """The cases with words changed that no pair depends on, so that rare pairs get more cases."""
        counts = Counter[tuple[int, int]]()
        for words in found:
            counts.update(permutations(self._held(words)[0], 2))
        cases = list(found)
        for place, words in enumerate(cases):
            order = list(self._domains)
            self._order.shuffle(order)
            for word in order:
                for value in self._domains[word]:
                    other = {**words, word: value}
                    if value == words[word] or self._problem(other):
                        continue
                    old, new = (set(self._held(one)[0]) for one in (words, other))
                    less, more = ([pair for pair in permutations(one, 2) if {*pair} & other_] for one, other_ in ((old, old - new), (new, new - old)))
                    if all(counts[pair] > 1 for pair in less) and sum(1 / (1 + counts[pair]) for pair in more) > sum(1 / counts[pair] for pair in less):
                        counts.subtract(less)
                        counts.update(more)
                        words = other
            cases[place] = words
        return cases

    def _held(self, words: Words) -> tuple[list[int], int]:
        levels = ((word, words[word]) for word in self._domains)
        numbers = [self._number[level] for level in levels if level in self._number]
        return numbers, sum(1 << number for number in numbers)

    def _gain(self, words: Words) -> int:
        numbers, bits = self._held(words)
        return sum((self._missing[number] & bits).bit_count() for number in numbers)

    def _improved(self, words: Words, fixed: Mapping[str, Any]) -> Words:
        """The case with single words changed, as long as it covers more."""
        gain, before = self._gain(words), -1
        while gain > before:
            before = gain
            order = [word for word in self._domains if word not in fixed]
            self._order.shuffle(order)
            for word in order:
                for value in self._domains[word]:
                    other = None if words[word] == value else self._repaired(words, {**fixed, word: value}, mend=False)
                    if other and (more := self._gain(other)) > gain:
                        words, gain = other, more
        return words

    def _enabled(self, words: Words, fixed: Words) -> Words | None:
        """The case with these words fixed; where rules alone do not lead there, with one more word guessed."""
        found = self._repaired(words, fixed)
        for word, values in () if found else self._domains.items():
            for value in values if word not in fixed and not found else ():
                guess = {**fixed, word: value}
                if _key(self._problem({**words, **guess})) != _key(self._problem({**words, **fixed})):
                    found = self._repaired(words, guess)
        return found

    def _repaired(self, words: Words, fixed: Words, *, mend: bool = True) -> Words | None:
        """The case with these words fixed and others changed until it is legal, None when that is not found.

        Without `mend` rules alone propose changes.
        """
        words = {**words, **fixed}
        for _ in range(_REPAIRS):
            problem = self._problem(words)
            if not problem:
                return words
            change = self._proposed(problem, fixed) or (self._mended(words, fixed) if mend else {})
            if not change:
                return None
            words = {**words, **change}
        return None

    def _proposed(self, problem: str | CaseError, fixed: Words) -> Words:
        """The legal value that a rule names, none where its word is fixed or takes no such value here."""
        if not isinstance(problem, CaseError) or problem.key in fixed:
            return {}
        key, legal = problem.key, problem.legal.removeprefix(f"{problem.key}=")
        for value in self._domains.get(key, ()):
            if write(value) in legal.split("|"):
                return {key: value}
        return {key: int(legal)} if key in _SIZES and legal.isdigit() else {}

    def _mended(self, words: Words, fixed: Words) -> Words:
        """The first change of one word that makes a case legal, none where there is none."""
        for word, values in self._domains.items():
            for value in values if word not in fixed else ():
                if value != words[word] and not self._problem({**words, word: value}):
                    return {word: value}
        return {}

    def _problem(self, words: Words) -> str | CaseError:
        """The first rule that these words break, "" for none."""
        known = tuple(words.values())
        if known not in self._problems:
            try:
                self._problems[known] = "" if self._taken(Case(**words)) else "not taken"
            except CaseError as problem:
                self._problems[known] = problem
        return self._problems[known]


def _key(problem: str | CaseError) -> tuple[str, str]:
    """What tells two problems apart."""
    return (problem.key, problem.rule) if isinstance(problem, CaseError) else ("", problem)


def _words(case: Case) -> Words:
    return {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
