"""Finds the default cases: as little to run as a search finds that holds every legal pair of values of two words.

    python -m bench.default_cases --seconds 1200

The values are those of `reference.case.domains`, on meshes of up to 8 ranks. The everyday recipes are there whatever
they hold. A case for a missing pair is a known one with both values, changed as the rules propose
(`reference.case.repair`), and then in single words as long as that holds more (AETG: Cohen et al., IEEE TSE 23, 1997).
After that a few cases at a time are taken out and found anew; what costs less is kept. The list is written to
`reference/case/default_cases.txt`, from which another call goes on.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Any

from reference.case import Case, CaseError
from reference.case.default_cases import FILE, NUMBERS, RANKS, line_of, lines, paired_domains
from reference.case.modes import MODES
from reference.case.repair import Problem, Words, problem_of, repaired, words_of

_DEARER = (
    ("packed", 0.015),
    ("dropout", 0.017),
    ("dtype", 0.034),
    ("recompute", 0.023),
    ("zero", 0.017),
    ("optimizer", 0.015),
)
_SOURCES, _BUILT = 6, 2
"""In how many cases a missing pair is looked for, and of how many of these the best is taken."""
Needs = tuple[bool, bool]
NEEDS: tuple[Needs, ...] = ((True, True), (True, False), (False, True), (False, False))
"""What the case of a pair must have, the first of these that is possible: tp or wp splits something; its dtype is one
of SHARP.
"""
FEW, SHARP = 4, ("float64", "float32", "bfloat16", "float16")
"""The first is asked for where so many ranks will do."""
_CHEAPER = tuple((word, 1) for word in ("tp", "dp", "pp", "cp")) + (
    ("packed", False),
    ("dtype", "float64"),
    ("micro", 1),
    ("dropout", 0.0),
    ("optimizer", "sgd"),
)
"""What makes a case cost less."""
_KNOWN = 20
_SEEDS = 8
_TAKEN_OUT = 6
"""So many cases at most are found anew at a time."""
_WAYS: tuple[Words, ...] = (
    {},
    {"pp": 2, "layers": 4, "schedule": "interleaved", "chunks": 2, "group": 3, "micro": 3},
    {"cp": 4, "cp_comm": "alltoall-ring", "cp_inner": 2, "seq": 24},
    {"dtype": "float16", "master": "float32", "scaler": "static", "loss_scale": 8.0},
)
"""Where the search begins in every mode and family: words that need several others."""


def starts() -> list[Words]:
    """Legal cases of every mode to begin with."""
    found = []
    for mode in MODES:
        for words in ({**way, "family": family} for way in _WAYS for family in ("gpt", "llama")):
            with suppress(CaseError):
                found.append(words_of(Case.of(**{**NUMBERS, "layers": 1, "steps": 1, "tp": 1, "mode": mode, **words})))
    return found


def cost(words: Words) -> float:
    """About how many seconds a case takes, as measured: a part for itself, and one for every rank and step."""
    a_rank = 0.012 + 0.0375 * (words["layers"] - 1) + sum(seconds for word, seconds in _DEARER if _costs(words, word))
    return float(0.16 + ranks(words) * words["steps"] * a_rank * (0.4 + 0.2 * words["micro"]))


def _costs(words: Words, word: str) -> bool:
    plain = {"recompute": ("none", "selective"), "dtype": ("float64",), "optimizer": ("sgd",)}
    return words[word] not in plain.get(word, (0, False))


def _degenerate(case: Case) -> str:
    """What makes a case show less than another one: too few ranks or too many, a factor that is two sizes."""
    axes = {case.tp, case.dp, case.pp, case.cp, case.wp} - {1}
    return "" if 2 <= case.world_size <= RANKS and case.micro not in axes else "ranks or micro-batches"


class Search:
    """Finds cases for pairs. `wanted_in[needs][a]` are the levels, as bits, whose pair with level a must be in a case
    that has at least this: whether it splits something, whether it is sharp.
    """

    def __init__(self, kept: Sequence[Words], seed: int) -> None:
        self.kept, self.random = list(kept), random.Random(seed)
        self.domains = paired_domains()
        self.levels = [(word, value) for word, values in self.domains.items() for value in values]
        self.number = {level: number for number, level in enumerate(self.levels)}
        self.known: dict[tuple[Any, ...], Problem] = {}
        self.seeds: list[list[Words]] = []
        self.wanted_in = {needs: [0] * len(self.levels) for needs in NEEDS}
        self.counted: dict[Needs, list[int]] = {}
        self.lost: set[tuple[int, int]] = set()

    def problem(self, words: Words) -> Problem:
        """What is against a case: a rule, its number of ranks, or as many micro-batches as ranks on an axis."""
        key = tuple(words.values())
        if key not in self.known:
            self.known[key] = problem_of(words, _degenerate)
        return self.known[key]

    def unfit(self, words: Words, needs: Needs) -> Problem:
        """The same where a case must have this; one that splits something must do so over few ranks."""
        fits = all(has or not need for has, need in zip(has_of(words), needs, strict=True))
        return self.problem(words) or ("" if fits and not (needs[0] and ranks(words) > FEW) else "unfit")

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
                if (not needs[0] or "mode" in fixed) and self.first(sources, fixed, partial(self.unfit, needs=needs)):
                    self.wanted_in[needs][a] |= 1 << b
                    self.wanted_in[needs][b] |= 1 << a
                    break
        for has in NEEDS:
            least = [needs for needs in NEEDS if all(h or not n for h, n in zip(has, needs, strict=True))]
            self.counted[has] = [sum(self.wanted_in[n][a] for n in least) for a in range(len(self.levels))]

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
        (numbers, bits), counted = self.held(words), self.counted[has_of(words)]
        for number in numbers:
            missing[number] &= ~(bits & counted[number])

    def gain(self, missing: list[int], words: Words) -> int:
        """How many missing pairs a case holds, each counted twice."""
        (numbers, bits), counted = self.held(words), self.counted[has_of(words)]
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
                self.lost.add(pair)
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
        start = min(starts_once(), key=lambda start: sum(start[word] != words[word] for word in words))
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
            (numbers, bits), counted = self.held(words), self.counted[has_of(words)]
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


def has_of(words: Words) -> Needs:
    """Does the mode of a case split anything, and does its dtype show small errors?"""
    return words["tp"] > 1 or words["wp"] > 1, words["dtype"] in SHARP


def ranks(words: Words) -> int:
    """The size of its mesh."""
    return int(words["tp"] * words["dp"] * words["pp"] * words["cp"])


def total(found: Sequence[Words]) -> float:
    return sum(map(cost, found))


def _key(problem: Problem) -> tuple[str, str]:
    return (problem.key, problem.rule) if isinstance(problem, CaseError) else ("", problem)


_STARTS: list[Words] = []


def starts_once() -> list[Words]:
    if not _STARTS:
        _STARTS.extend(starts())
    return _STARTS


def shortest(words: Words) -> Words:
    """The case with one step and as few layers as it may have."""
    words = {**words, "micro": words["micro"] if words["micro"] != 2 else 1}
    ways = ({**words, "steps": 1, "layers": layers} for layers in range(1, words["layers"]))
    return next((way for way in ways if not problem_of(way)), {**words, "steps": 1})


def finished(found: Sequence[Words], kept: Sequence[Words], domains: Mapping[str, Sequence[Any]]) -> list[Words]:
    """The cases with two steps and layers where a value would be in no such case otherwise, not even one of those that
    are kept.
    """
    longer = [_twice(words) for words in found]
    price = [cost(after) - cost(before) for before, after in zip(found, longer, strict=True)]
    held = [{(word, words[word]) for word in domains} for words in longer]
    done = {(w, words[w]) for words in kept for w in domains if words["steps"] > 1 and words["layers"] > 1}
    missing, chosen = set().union(*held) - done, set[int]()
    while missing:
        best = max(range(len(found)), key=lambda number: len(missing & held[number]) / price[number])
        chosen.add(best)
        missing -= held[best]
    for number in sorted(chosen, key=lambda number: -price[number]):
        others = set().union(done, *(held[other] for other in chosen - {number}))
        chosen -= {number} if held[number] <= others else set()
    return [longer[number] if number in chosen else words for number, words in enumerate(found)]


def _twice(words: Words) -> Words:
    ways = ({**words, "steps": 2, "layers": layers} for layers in range(max(2, words["layers"]), 9))
    return next((way for way in ways if not problem_of(way)), {**words, "steps": 2})


def main() -> int:
    """Search for so many seconds, and write the list down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long to search")
    parser.add_argument("--seed", type=int, default=0, help="another seed goes other ways")
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    kept, before = ([words_of(case) for case in lines()[section]] for section in ("recipes", "pairs"))
    search = Search(kept, asked.seed)
    search.begin([*kept, *before])
    print({n: sum(b.bit_count() for b in w) // 2 for n, w in search.wanted_in.items()}, flush=True)
    found = search.without_idle(search.completed([shortest(words) for words in before]))
    tries = 0
    while time.monotonic() < end and not Path("/tmp/stop").exists():
        found = search.cheaper(found)
        tries += 1
        print(f"\r{len(found)} cases, cost {total(found):.2f} {tries}", end="", flush=True)
    _write(finished(found, kept, search.domains))
    return 0


def _write(found: Sequence[Words]) -> None:
    by_hand = FILE.read_text(encoding="utf-8").partition("\npairs:\n")[0]
    new = sorted(line_of(Case(**words)) for words in found)
    FILE.write_text("\n".join([by_hand, "pairs:", *new, ""]), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
