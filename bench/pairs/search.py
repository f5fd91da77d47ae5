"""The search for cases that hold every pair of values of two words, at little cost.

A case for a missing pair is a known one with both values, changed as the rules propose, and then in single words as
long as that holds more (AETG: Cohen et al., IEEE TSE 23, 1997). A few cases at a time are found anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain, combinations, islice
from typing import Any

from bench.pairs.cases import cost, degenerate, ranks, splits, starts, total
from reference.case import CaseError
from reference.case.default_cases import NUMBERS, paired_domains
from reference.case.repair import Problem, Words, problem_of, repaired
from reference.language.modes import MODES

__all__ = ["Search"]

NEEDS = (True, False)
"""Whether the case of a pair must split something, the first of these that is possible."""
FEW = 4
"""The first is asked for, of pairs with a mode, where so many ranks will do."""
_SOURCES, _BUILT = 6, 2
"""In how many cases a missing pair is looked for, and of how many of these the best is taken."""
_CHEAPER: tuple[tuple[str, Any], ...] = (
    *((word, 1) for word in ("tp", "dp", "pp", "cp", "micro")),
    ("packed", False),
    ("dtype", "float64"),
    ("dropout", 0.0),
    ("optimizer", "sgd"),
)
"""What makes a case cost less."""
_KNOWN, _EXPLORED = 20, 30_000
"""Near how many stored cases a pair is looked for, and how many random ones show further pairs."""
_SEEDS, _TAKEN_OUT = 8, 6
"""How many cases of a value are kept to begin with, and how many cases at most are found anew at a time."""


class Search:
    """Finds cases for pairs. `wanted_in[needs][a]` are the levels, as bits, whose pair with level a must be in a case
    that splits something (True) or in any (False).
    """

    def __init__(self, kept: Sequence[Words], seed: int) -> None:
        self.kept, self.random = list(kept), random.Random(seed)
        self.domains = paired_domains()
        self.levels = [(word, value) for word, values in self.domains.items() for value in values]
        self.number = {level: number for number, level in enumerate(self.levels)}
        self.known: dict[tuple[Any, ...], Problem] = {}
        self.seeds: list[list[Words]] = []
        self.modes = sum(1 << self.number["mode", mode] for mode in MODES)
        self.wanted_in = {needs: [0] * len(self.levels) for needs in NEEDS}
        self.counted: dict[bool, list[int]] = {}

    def problem(self, words: Words) -> Problem:
        """What is against a case: a rule, its number of ranks, or as many micro-batches as ranks on an axis."""
        key = tuple(words.values())
        if key not in self.known:
            self.known[key] = problem_of(words, degenerate)
        return self.known[key]

    def unfit(self, words: Words, needs: bool) -> Problem:
        """The same where a case must have this; one that splits something must do so over few ranks."""
        fits = splits(words) or not needs
        return self.problem(words) or ("" if fits and not (needs and ranks(words) > FEW) else "unfit")

    def repaired(self, words: Words, fixed: Words, *, search: bool = False) -> Words | None:
        """A legal case with the words of `fixed`, near these words."""
        return repaired(words, fixed, self.domains, self.problem, search=search)

    def begin(self, known: Sequence[Words]) -> None:
        """Find out which pairs are possible, and which of them on few ranks that split something, near known cases."""
        begin = starts()
        for level in self.levels:
            fixed = dict([level])
            ways = (self.repaired(start, fixed) for start in begin)
            searched = (self.repaired(start, fixed, search=True) for start in begin)
            guessed = (self.enabled(start, fixed) for start in begin)
            near = list(islice(filter(None, ways), _SEEDS))
            self.seeds.append(near or list(islice(filter(None, chain(searched, guessed)), _SEEDS)))
        for a, b in combinations(range(len(self.levels)), 2):
            if self.levels[a][0] == self.levels[b][0] or not (self.seeds[a] and self.seeds[b]):
                continue
            fixed = dict((self.levels[a], self.levels[b]))
            sources = [*self.sources((a, b)), *self.random.sample(known, min(_KNOWN, len(known)))]
            for needs in NEEDS:
                if (not needs or "mode" in fixed) and self.first(sources, fixed, partial(self.unfit, needs=needs)):
                    self.wanted_in[needs][a] |= 1 << b
                    self.wanted_in[needs][b] |= 1 << a
                    break
        self.explore(known)
        for has in NEEDS:
            least = [needs for needs in NEEDS if has or not needs]
            self.counted[has] = [sum(self.wanted_in[n][a] for n in least) for a in range(len(self.levels))]

    def explore(self, known: Sequence[Words]) -> None:
        """Find further possible pairs: each case is one before it with a few random words at random values."""
        found = list(known)
        for _ in range(_EXPLORED):
            changed = self.random.sample(sorted(self.domains), self.random.randint(1, 3))
            fixed = {word: self.random.choice(self.domains[word]) for word in changed}
            words = self.repaired(self.random.choice(found), fixed)
            if not words or any(words[word] != NUMBERS[word] for word in NUMBERS if word != "seq"):
                continue
            found.append(words)
            numbers, bits = self.held(words)
            splits_few = splits(words) and ranks(words) <= FEW
            for number in numbers:
                wanted = sum(bits_of[number] for bits_of in self.wanted_in.values())
                new = bits & ~wanted
                of_mode = new if self.levels[number][0] == "mode" else new & self.modes
                least = splits_few
                self.wanted_in[least][number] |= of_mode
                self.wanted_in[False][number] |= new & ~of_mode

    def sources(self, pair: tuple[int, int]) -> list[Words]:
        """Known cases with one of two levels, or with both and with what these need."""
        seeds = [self.seeds[number] for number in pair]
        both = ({**words, **self.differing(other)} for words, other in zip(*seeds, strict=False))
        return [*both, *chain(*seeds)]

    def first(self, sources: Sequence[Words], fixed: Words, problem: Callable[[Words], Problem]) -> Words | None:
        """The first case with these words that is found near the sources."""
        ruled = (repaired(words, fixed, self.domains, problem) for words in sources)
        searched = (repaired(words, fixed, self.domains, problem, search=True) for words in sources[:_SOURCES])
        return next(filter(None, chain(ruled, searched)), None)

    def enabled(self, words: Words, fixed: Words) -> Words | None:
        """The case with these words fixed; where rules alone do not lead there, with one more word guessed."""
        found = self.repaired(words, fixed, search=True)
        before = _key(self.problem({**words, **fixed}))
        for word, values in () if found else self.domains.items():
            for value in values if word not in fixed and not found else ():
                guess = {**fixed, word: value}
                if _key(self.problem({**words, **guess})) != before:
                    found = self.repaired(words, guess, search=True)
        return found

    def held(self, words: Words) -> tuple[list[int], int]:
        """The levels of a case, and the same as bits."""
        numbers = [self.number[level] for word in self.domains if (level := (word, words[word])) in self.number]
        return numbers, sum(1 << number for number in numbers)

    def missing(self, found: Sequence[Words]) -> list[int]:
        """For every level the others that no case has together with it, as bits."""
        missing = list(self.counted[NEEDS[0]])
        for words in found:
            self.cover(missing, words)
        return missing

    def cover(self, missing: list[int], words: Words) -> None:
        """Nothing of this case is missing."""
        (numbers, bits), counted = self.held(words), self.counted[splits(words)]
        for number in numbers:
            missing[number] &= ~(bits & counted[number])

    def gain(self, missing: list[int], words: Words) -> int:
        """How many missing pairs a case holds, each counted twice."""
        (numbers, bits), counted = self.held(words), self.counted[splits(words)]
        return sum((missing[number] & bits & counted[number]).bit_count() for number in numbers)

    def completed(self, found: list[Words]) -> list[Words]:
        """More cases, until no possible pair is missing."""
        missing = self.missing([*self.kept, *found])
        while any(missing):
            pair = self.wanted(missing)
            words = self.built(pair, found, missing)
            if words and self.gain(missing, words):
                self.cover(missing, words)
                found.append(words)
            else:
                for one, other in (pair, pair[::-1]):
                    missing[one] &= ~(1 << other)
        return found

    def wanted(self, missing: list[int]) -> tuple[int, int]:
        """A missing pair: of a level that lacks many, mostly."""
        lacks = [bits.bit_count() * self.random.uniform(0.7, 1.0) for bits in missing]
        first = max(range(len(lacks)), key=lacks.__getitem__)
        others = [number for number in range(len(lacks)) if missing[first] >> number & 1]
        return first, max(others, key=lacks.__getitem__)

    def built(self, pair: tuple[int, int], found: Sequence[Words], missing: list[int]) -> Words | None:
        """A legal case with this pair that holds much else that is missing, None when none is found."""
        fixed = dict(self.levels[number] for number in pair)
        near = [words for words in found if any(words[word] == value for word, value in fixed.items())]
        self.random.shuffle(near)
        sources = [*near[:3], *self.sources(pair)]
        needs = next(needs for needs in NEEDS if self.wanted_in[needs][pair[0]] >> pair[1] & 1)
        ruled = (self.repaired(words, fixed) for words in sources)
        searched = (self.repaired(words, fixed, search=True) for words in sources[:_SOURCES])
        fit = partial(self.unfit, needs=needs)
        fitted = (repaired(words, fixed, self.domains, fit, search=True) for words in sources)
        legal = (words for words in chain(ruled, searched, fitted) if words and not fit(words))
        improved = [self.improved(words, fixed, missing) for words in islice(legal, _BUILT)]
        return max(improved, key=lambda words: self.gain(missing, words) / cost(words), default=None)

    def differing(self, words: Words) -> Words:
        """What a seed has that the start nearest to it has not: its level, and words that it needs."""
        start = min(starts(), key=lambda start: sum(start[word] != words[word] for word in words))
        return {word: value for word, value in words.items() if value != start[word]}

    def improved(self, words: Words, fixed: Collection[str], missing: list[int]) -> Words:
        """The case with single words changed, as long as it holds more that is missing for what it costs."""
        worth = self.gain(missing, words) / cost(words)
        again = True
        while again:
            again = False
            wanted = [level for level, bits in zip(self.levels, missing, strict=True) if bits]
            order = [(word, value) for word, value in (*wanted, *_CHEAPER) if word not in fixed]
            self.random.shuffle(order)
            for word, value in order:
                if words[word] != value:
                    other = self.repaired(words, {**{key: words[key] for key in fixed}, word: value})
                    if other and (more := self.gain(missing, other) / cost(other)) > worth:
                        words, worth, again = other, more, True
        return words

    def without_idle(self, found: list[Words]) -> list[Words]:
        """The cases without those that hold nothing alone, the dearest left out first."""
        while idle := [words for words, alone in zip(found, self.alone(found), strict=True) if not alone]:
            dearest = max(idle, key=cost)
            found = [words for words in found if words is not dearest]
        return found

    def alone(self, found: Sequence[Words]) -> list[int]:
        """How many pairs every case holds alone."""
        begin = self.missing(self.kept)
        once, twice = list(begin), [0] * len(self.levels)
        for words in found:
            (numbers, bits), counted = self.held(words), self.counted[splits(words)]
            for number in numbers:
                now = bits & counted[number]
                twice[number] |= now & ~once[number] & begin[number]
                once[number] &= ~now
        lone = [wanted & ~again for wanted, again in zip(begin, twice, strict=True)]
        return [self.gain(lone, words) for words in found]

    def cheaper(self, found: list[Words]) -> list[Words]:
        """The list with a few cases found anew, or as it was."""
        alone = self.alone(found)
        few = sorted(
            range(len(found)), key=lambda number: alone[number] * self.random.uniform(0.5, 2) / cost(found[number])
        )
        out = few[: self.random.randint(2, _TAKEN_OUT)]
        rest = [words for number, words in enumerate(found) if number not in out]
        new = self.without_idle(self.completed(list(rest)))
        if any(self.missing([*self.kept, *new])):
            return found
        return new if total(new) <= total(found) + 1e-9 else found


def _key(problem: Problem) -> tuple[str, str]:
    return (problem.key, problem.rule) if isinstance(problem, CaseError) else ("", problem)
