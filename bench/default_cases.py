"""Finds the default cases: the cheapest list that the search finds with every legal pair of values of two words.

    python -m bench.default_cases --seconds 1200

What is wanted: pairs of the values of `reference.case.domains`, on meshes of up to 8 ranks. Every value is also wanted
in a long case, of two steps and layers. A feature that keeps something from step to step needs several micro-batches
in the long case, and such features are wanted in pairs there. The everyday recipes are in the list whatever they hold.

How it is found: a case for a missing pair is a known case with both values, changed as the rules propose
(`reference.case.domains`). Single words are then changed as long as the case holds more missing pairs for its cost
(AETG: Cohen et al., IEEE TSE 23, 1997). After that a few cases at a time are taken out and found anew, and single words
are changed. A change that costs less and loses no pair is kept. In the second half of the time words are changed so
that the cases hold more triples of values at the same cost. Wanted are triples of words that one file of `parallel`
reads, since its code may be wrong for some of their values alone, and pairs of such words in a long case. A property of
a case counts as the words from which it is found.

The list is written to `reference/case/default_cases.txt`, from which another call goes on. Rules propose one word at a
time. Where they lead nowhere, two values are joined with all words that either needs in a known case. If a value needs
others that no line has, write a line with all of them first.
"""

import argparse
import ast
import inspect
import itertools
import math
import random
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardproof import parallel
from shardproof.reference.case import Case
from shardproof.reference.case.default_cases import FILE, NUMBERS, RANKS, line_of, lines, paired_domains
from shardproof.reference.case.domains import Problem, Words, problem_of, repair_words, words_of
from shardproof.reference.features import WORDS


def words_read_together() -> list[frozenset[str]]:
    """For each file of `parallel`, the words that it reads of a case."""
    files = sorted(Path(parallel.__path__[0]).rglob("*.py"))
    return [frozenset().union(*map(_words, _read_of_a_case(ast.parse(file.read_text())))) for file in files]


def _read_of_a_case(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of = node.value
            if "case" in (of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""):
                yield node.attr
        elif isinstance(node, ast.keyword) and node.arg == "when" and isinstance(node.value, ast.Constant):
            names = ast.walk(ast.parse(str(node.value.value), mode="eval"))
            yield from (name.id for name in names if isinstance(name, ast.Name))


@cache
def _words(name: str) -> frozenset[str]:
    """The words from which a property of a case is found: for a word itself, for any other name none."""
    found = inspect.getattr_static(Case, name, None)
    if name in WORDS or not isinstance(found, property) or not found.fget:
        return frozenset({name} & WORDS.keys())
    tree = ast.parse(textwrap.dedent(inspect.getsource(found.fget)))
    read = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr != name)
    own = (node.attr for node in read if isinstance(node.value, ast.Name) and node.value.id == "self")
    return frozenset().union(*map(_words, own))


Matrix = NDArray[np.bool_]
"""For every two levels: whether a case holds both, or whether the pair is wanted."""
_NEAR, _TAKEN_OUT, _STARTS, _TRIED, _HOLDING = 80, 7, 4, 14, 4
"""Numbers of cases: near which a pair is looked for, which are found anew at a time, from which a search starts, which
are tried for each of these, and which show what a value needs.
"""
_TRIPLES_A_SECOND, _CHANGES = 200, 2000
"""The triples that a second of a case's time must add, and how many changes are tried for triples at a time."""
_AXES = tuple(Case().mesh)
"""The words that are sizes of a mesh of ranks."""
STATES = frozenset(
    {"zero", "prefetch", "early_stop", "recompute", "scaler", "no_sync", "grad_dtype", "parity", "bias_rate"}
    | {"dropout", "attention_dropout", "random"}
)
"""Words of features that keep something from micro-batch to micro-batch, or from step to step."""
_CHANGED = ("steps", "micro", "layers", *_AXES, "dtype", "zero", "recompute", "dropout", "attention_dropout", "experts")
_LENGTHS = {"steps": (1, 2, 3, 4), "layers": (1, 2, 4), "micro": (1, 2, 3)}
_FREE = ("seq", "ffn", "vocab", "lr")
_OF_BFLOAT16 = 10.0
"""The learning rate if parameters are stored in bfloat16, where a small step would be rounded away."""


def cost(words: Words) -> float:
    """Processor seconds of a case, as measured (least squares over a default run and the cases of a search)."""
    ranks, steps, micro = math.prod(words[axis] for axis in _AXES), words["steps"], words["micro"]
    layers = words["layers"] + words["prediction_depth"]
    experts, recomputes = bool(words["experts"]), words["recompute"] != "none"
    drops = bool(words["dropout"] or words["attention_dropout"])
    on_ranks, dense = ranks * steps * layers / words["pp"], words["dp"] * steps * micro * layers
    of_micro = 0.002 + 0.0075 * experts + 0.008 * bool(words["kv_lora_rank"]) + 0.0033 * recomputes
    of_micro += 0.0018 * drops + 0.0038 * (words["cp"] > 1)
    found = 0.024 + on_ranks * (0.02 + micro * of_micro) + 0.006 * ranks * steps * bool(words["zero"])
    found += dense * (0.0047 + 0.0068 * experts + 0.0035 * drops)
    if words["dtype"] == "float32":
        found += 0.009 + dense * (0.014 + 0.01 * experts)
    elif words["dtype"] != "float64":
        found += 0.023 + dense * (0.0047 + 0.0017 * experts + 0.011 * drops) + 0.0077 * steps * layers**2
    return float(found + 0.0088 * steps * (words["dtype"] == "float16"))


def is_long(words: Words) -> bool:
    """Whether a case has several layers, and steps that meet what an earlier step left behind."""
    return bool(words["layers"] > 1 and words["steps"] > max(1, words["parity"]))


def needed_with(words: Words, word: str) -> Words:
    """The words of a legal case that cannot become plain, one after the other, while this word stays as it is."""
    plain, needed, before = words_of(Case()), dict(words), dict[str, Any]()
    while needed != before:  # a word may become plain only after another one that needs it
        before = dict(needed)
        for other in sorted(plain, key=lambda each: each in _LENGTHS):  # the sizes of other words go first
            if other != word and needed[other] != plain[other]:
                less = {**needed, other: plain[other]}
                needed = needed if problem_of(less) else less
    return {other: value for other, value in needed.items() if value != plain[other] and other not in (word, *NUMBERS)}


def join_needs(fixed: Words, known: Sequence[Words]) -> Words | None:
    """The values of `fixed`, with all words that each of them needs in a known case; None if these contradict each
    other.
    """
    joined: Words = {}
    plain = words_of(Case())
    for word, value in fixed.items():
        holding = [words for words in known if words[word] == value]
        holding.sort(key=lambda words: sum(words[each] != plain[each] for each in plain))
        every = [needed_with(words, word) for words in holding[:_HOLDING]]
        for other, needs in min(every, key=len, default={}).items():
            longest = max(needs, joined.get(other, needs)) if other in _LENGTHS else needs
            if other not in _LENGTHS and {joined.get(other, needs), fixed.get(other, needs)} != {needs}:
                return None
            joined[other] = longest
    return {**joined, **fixed}


def _problem(words: Words) -> Problem:
    """Why a case is illegal, or shows less than others: by its number of ranks, equal sizes, or unusual sizes."""

    def degenerate(case: Case) -> str:
        axes = {*case.mesh.values(), case.wp} - {1}
        sizes = (case.hidden, case.heads, case.ffn, case.vocab, case.seq, case.batch, case.micro, case.head_dim)
        usual = all(getattr(case, word) == NUMBERS[word] for word in NUMBERS if word not in _FREE)
        fit = 2 <= case.world_size <= RANKS and case.micro not in axes and len({*sizes}) == len(sizes)
        return "" if fit and usual else "ranks, micro-batches or sizes"

    return problem_of(words, degenerate)


class Pairs:
    """The levels of cases, each a word with a value, and which pairs of them a case holds.

    There are three more kinds of levels: "split" with the mode of a case that splits something, "long", and for a long
    case of several micro-batches "kept" with each word of STATES.
    """

    def __init__(self) -> None:
        self.domains = paired_domains()
        plain = [(word, value) for word, values in self.domains.items() for value in values]
        split = [("split", mode) for mode in self.domains["mode"]]
        states = [(f"kept {word}", value) for word, value in plain if word in STATES]
        self.levels: list[tuple[str, object]] = [*plain, *split, ("long", True), *states]
        self._number = {level: number for number, level in enumerate(self.levels)}
        kinds = [word.partition(" ")[0] if word in ("split", "long") or " " in word else "" for word, _ in self.levels]
        words = [word for word, _ in self.levels]
        size = len(self.levels)
        self.kinds: Matrix = np.zeros((size, size), bool)
        for one in range(size):
            for other in range(one):
                pair = {kinds[one], kinds[other]}
                fits = pair in ({""}, {"", "split"}, {"kept"}) or (
                    pair == {"", "long"} and not {words[one], words[other]} & STATES
                )
                alike = words[one] == words[other] or {"mode", "split"} == {words[one], words[other]}
                self.kinds[one, other] = self.kinds[other, one] = fits and not alike
        self.triples = self._triples()

    def _triples(self) -> NDArray[np.int32]:
        """All triples of levels, by number, whose words one file reads; a long case may be in place of one word."""
        found: set[tuple[int, ...]] = set()
        for words in words_read_together():
            of_word = [[self._number[word, value] for value in self.domains.get(word, ())] for word in sorted(words)]
            of_word = [numbers for numbers in of_word if numbers] + [[self._number["long", True]]]
            for three in itertools.combinations(of_word, 3):
                found.update(itertools.product(*three))
        return np.array(sorted(found), np.int32)

    def triples_of(self, words: Words) -> NDArray[np.bool_]:
        """Which of `triples` a case holds."""
        held = self.vector(words) > 0
        return np.asarray(held[self.triples].all(1), np.bool_)

    def vector(self, words: Words) -> NDArray[np.float32]:
        """1 for every level of a case."""
        found = [(word, words[word]) for word in self.domains]
        if words["tp"] > 1 or words["wp"] > 1:
            found.append(("split", words["mode"]))
        if is_long(words):
            found.append(("long", True))
            found += [(f"kept {word}", words[word]) for word in STATES] if words["micro"] > 1 else []
        vector = np.zeros(len(self.levels), np.float32)
        vector[[self._number[level] for level in found if level in self._number]] = 1
        return vector

    def pairs_of(self, words: Words) -> Matrix:
        """The pairs of a case."""
        vector = self.vector(words) > 0
        return vector[:, None] & vector & self.kinds

    def words(self, *numbers: int) -> Words:
        """The words of a case with these levels."""
        found: Words = {}
        for word, value in (self.levels[number] for number in numbers):
            if word == "long" or " " in word:
                found |= {"steps": 3 if (word, value) == ("kept parity", 2) else 2, "layers": 2}
            if word != "long":
                found["mode" if word == "split" else word.removeprefix("kept ")] = value
        return found


class Search:
    """Finds cases for pairs that `kept` do not hold; it starts from the cases `known`."""

    def __init__(self, kept: Sequence[Words], known: Sequence[Words], seed: int) -> None:
        self.pairs, self.known, self.random = Pairs(), list(known), random.Random(seed)
        self.values = {**self.pairs.domains, **_LENGTHS}
        self.wanted = self._union([*known, *kept])
        for one, other in np.argwhere(np.triu(self.pairs.kinds)):
            fixed = self.pairs.words(one, other)
            if not self.wanted[one, other] and (found := self._near(fixed) or self._join_pair(fixed)):
                self.known.append(found)
                self.wanted |= self.pairs.pairs_of(found)
        for place, (word, mode) in enumerate(self.pairs.levels):  # a pair with "split" has the plain mode in it
            if word == "split":
                whole = self.pairs.levels.index(("mode", mode))
                self.wanted[whole] &= ~self.wanted[place]
                self.wanted[:, whole] &= ~self.wanted[:, place]
        self.wanted &= ~self._union(kept)

    def _union(self, cases: Iterable[Words]) -> Matrix:
        found = np.zeros_like(self.pairs.kinds)
        for words in cases:
            found |= self.pairs.pairs_of(words)
        return found

    def propose_case(self, words: Words, fixed: Words) -> Words | None:
        """The case with these words and what the rules propose; None if they propose none."""
        found = repair_words(words, fixed, self.values, _problem)
        if not found:
            return None
        loses = found["dtype"] == "bfloat16" and found["master"] == "none"
        found["lr"] = _OF_BFLOAT16 if loses else NUMBERS["lr"]
        return None if _problem(found) else found

    def _near(self, fixed: Words) -> Words | None:
        sources = self.random.sample(self.known, min(_NEAR, len(self.known)))
        return next(filter(None, (self.propose_case(words, fixed) for words in sources)), None)

    def _join_pair(self, fixed: Words) -> Words | None:
        """The plainest case with these values and all that they need."""
        needs = join_needs(fixed, self.known)
        plain = {**words_of(Case()), **NUMBERS}
        starts = ({**plain, **needs, "micro": needs.get("micro", count)} for count in (1, 3)) if needs else ()
        return next(filter(None, (self.propose_case(words, fixed) for words in starts)), None)

    def worth(self, words: Words, missing: NDArray[np.float32]) -> float:
        """How many missing pairs a case holds for its cost."""
        vector = self.pairs.vector(words)
        return float(vector @ (missing @ vector)) / cost(words)

    def climb_words(self, words: Words, missing: NDArray[np.float32]) -> tuple[float, Words]:
        """The case with single words changed, as long as its worth grows; and its worth."""
        worth, better = self.worth(words, missing), True
        while better:
            gains = missing @ self.pairs.vector(words)
            by_level = dict(zip(self.pairs.levels, gains.tolist(), strict=True))
            changes = [(word, value) for word, values in self.values.items() for value in values]
            noise = {change: self.random.random() * (9 if change[0] in _CHANGED else 1) for change in changes}
            order = sorted(
                (change for change in changes if words[change[0]] != change[1]),
                key=lambda change: (
                    by_level.get((change[0], words[change[0]]), 0) - by_level.get(change, 0) - noise[change]
                ),
            )
            tried = (self.propose_case(words, {word: value}) for word, value in order[:_TRIED])
            found = max(
                ((self.worth(other, missing), n, other) for n, other in enumerate(tried) if other), default=None
            )
            better = found is not None and found[0] > worth * 1.0001
            if found is not None and better:
                worth, _, words = found
        return worth, words

    def complete_pairs(self, cases: Sequence[Words]) -> list[Words]:
        """The cases and more of them, until no pair is missing that a known case can hold."""
        cases = list(cases)
        missing = (self.wanted & ~self._union(cases)).astype(np.float32)
        while (places := np.argwhere(np.triu(missing))).size:
            pairs = [places[self.random.randrange(len(places))] for _ in range(_STARTS)]
            starts = [*filter(None, (self._near(self.pairs.words(*pair)) for pair in pairs))]
            some = self.random.sample(self.known, min(_NEAR, len(self.known)))
            starts += sorted(some, key=lambda words: -self.worth(words, missing))[:2]
            worth, best = max((self.climb_words(words, missing) for words in starts), key=lambda found: found[0])
            if not worth:
                holding = [words for words in self.known if self.worth(words, missing)]
                if not holding:
                    break
                best = holding[0]
            cases.append(best)
            missing[self.pairs.pairs_of(best)] = 0
        return self.without_idle(cases)

    def _times(self, cases: Iterable[Words]) -> NDArray[np.int16]:
        times = np.zeros(self.wanted.shape, np.int16)
        for words in cases:
            times += self.pairs.pairs_of(words)
        return times

    def without_idle(self, cases: list[Words]) -> list[Words]:
        """The cases without those whose wanted pairs all are in other cases; the most expensive are dropped first."""
        times = self._times(cases)
        for words in sorted(cases, key=cost, reverse=True):
            its_pairs = self.pairs.pairs_of(words)
            if not (self.wanted & its_pairs & (times < 2)).any():
                cases = [other for other in cases if other is not words]
                times -= its_pairs
        return cases

    def plainer(self, cases: Sequence[Words]) -> list[Words]:
        """The cases with single words changed to cheaper values, if other cases hold the pairs that are lost."""
        cases, times = list(cases), self._times(cases)
        for place in sorted(range(len(cases)), key=lambda place: cost(cases[place]), reverse=True):
            for word, value in [(one, value) for one in _CHANGED for value in self.values[one]]:
                words = cases[place]
                other = self.propose_case(words, {word: value}) if words[word] != value else None
                if other and cost(other) < cost(words):
                    gone, come = self.pairs.pairs_of(words), self.pairs.pairs_of(other)
                    if not (self.wanted & gone & ~come & (times < 2)).any():
                        times += come.astype(np.int16) - gone
                        cases[place] = other
        return self.without_idle(cases)

    def cheaper(self, cases: list[Words]) -> list[Words]:
        """The list with a few cases found anew, preferably those that hold few pairs alone; or the list as it was."""
        times, count = self._times(cases), self.random.randint(2, _TAKEN_OUT)
        alone = [int((self.wanted & self.pairs.pairs_of(words) & (times < 2)).sum()) / cost(words) for words in cases]
        order = sorted(range(len(cases)), key=lambda place: alone[place] * (0.3 + self.random.random()))
        out = {*order[:count]} if self.random.random() < 0.6 else {*self.random.sample(range(len(cases)), count)}
        new = self.complete_pairs([words for place, words in enumerate(cases) if place not in out])
        lost = (self.wanted & self._union(cases) & ~self._union(new)).any()
        return cases if lost or sum(map(cost, new)) > sum(map(cost, cases)) else new

    def fuller(self, cases: Sequence[Words], others: Iterable[Words]) -> list[Words]:
        """The cases with words changed so that they and `others` hold more triples, and all pairs as before."""
        cases, times = list(cases), self._times(cases)
        most = sum(map(cost, cases))
        held = [self.pairs.triples_of(words) for words in cases]
        count = np.sum([*held, *map(self.pairs.triples_of, others)], axis=0, dtype=np.int16)
        for number in range(_CHANGES):
            place = self.random.randrange(len(cases))
            words = cases[place]
            if number % 2:
                changed = self.random.sample(sorted(self.values), self.random.randint(1, 2))
                fixed = {word: self.random.choice(self.values[word]) for word in changed}
            else:  # triples that no case holds, of which this one holds two levels
                levels = self.pairs.vector(words)[self.pairs.triples].sum(1)
                near = np.flatnonzero((count == 0) & (levels == 2))
                fixed = self.pairs.words(*self.pairs.triples[self.random.choice(near)]) if near.size else {}
            other = self.propose_case(words, fixed)
            if not other or other == words:
                continue
            gone, come = self.pairs.pairs_of(words), self.pairs.pairs_of(other)
            dearer, has = cost(other) - cost(words), self.pairs.triples_of(other)
            more = int((has & (count == 0)).sum()) - int((held[place] & ~has & (count == 1)).sum())
            affordable = dearer <= max(0.0, most - sum(map(cost, cases)))
            lost = (self.wanted & gone & ~come & (times < 2)).any()
            if affordable and more > dearer * _TRIPLES_A_SECOND and not lost:
                times += come.astype(np.int16) - gone
                count += has.astype(np.int16) - held[place]
                cases[place], held[place] = other, has
        return cases


def main() -> int:
    """Search for the given seconds, and write the list down whenever it costs less."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="how long to search")
    parser.add_argument("--seed", type=int, default=0, help="another seed goes other ways")
    asked = parser.parse_args()
    half_s = time.monotonic() + asked.seconds / 2
    kept, before = ([words_of(case) for case in lines()[section]] for section in ("recipes", "pairs"))
    known = [{**words, "save": "", "load": ""} for words in (*before, *kept)]  # only the recipes use checkpoints
    search = Search(kept, [words for words in known if not _problem(words)], asked.seed)
    cases = search.plainer(search.complete_pairs([words for words in before if not _problem(words)]))
    by_hand = FILE.read_text(encoding="utf-8").partition("\npairs:\n")[0]
    for number in range(10**9):
        new = sorted({line_of(Case(**words)) for words in cases})
        FILE.write_text("\n".join([by_hand, "pairs:", *new, ""]), encoding="utf-8")
        print(f"\r{len(cases)} cases, cost {sum(map(cost, cases)):.2f}", end="", flush=True)
        if time.monotonic() > half_s + asked.seconds / 2:
            return 0
        if time.monotonic() > half_s:
            cases = search.fuller(cases, kept)
        else:
            cases = search.cheaper(search.plainer(cases) if number % 5 == 4 else cases)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
