"""Finds the default cases: as little to run as a search finds that holds every legal pair of values of two words.

    python -m bench.default_cases --seconds 1200

The values are those of `reference.case.domains`, on meshes of up to 8 ranks. The everyday recipes are there whatever
they hold. A case for a missing pair is a known one with both values, changed as the rules propose
(`reference.case.repair`). Single words are then changed as long as that holds more pairs (AETG: Cohen et al., IEEE TSE
23, 1997). After that a few cases at a time are taken out and found anew, and single words are changed. A change that
costs less and loses no pair is kept. The list is written to `reference/case/default_cases.txt`, from which another call
goes on. A value that needs several others which no line has: write a line with all of them first.
"""

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

from reference.case import Case
from reference.case.default_cases import FILE, RANKS, line_of, lines, paired_domains
from reference.case.repair import Problem, Words, problem_of, repaired, words_of

Pair = tuple[frozenset[tuple[str, object]], bool]
"""Two words with their values; True where they are in a case that splits something, as pairs with a mode must be."""
_NEAR, _TAKEN_OUT, _FEW = 60, 6, 4
"""Cases near which a pair is looked for, cases found anew at a time, ranks of a case that must split something."""
_DEARER = {"dropout": 0.035, "dtype": 0.055, "recompute": 0.004, "zero": 0.01, "optimizer": 0.011}
"""Words that make a case take longer, each with seconds of a rank and a step of three micro-batches."""
_PLAIN = {"recompute": ("none", "selective"), "dtype": ("float64",), "optimizer": ("sgd",)}


_STATES = (
    *("zero", "prefetch", "early_stop", "recompute", "scaler", "no_sync", "grad_dtype", "parity"),
    *("dropout", "attention_dropout", "random", "bias_rate"),
)
"""Words of what is kept from micro-batch to micro-batch, or from step to step."""
_AXES = tuple(Case().mesh)
"""The words that are sizes of a mesh of ranks."""


def cost(words: Words) -> float:
    """Seconds of a case, as measured (least squares over the seconds of a default run).

    A part is for the case itself, another for every rank, layer on it, step and micro-batch.
    """
    dearer = sum(seconds for word, seconds in _DEARER.items() if words[word] not in _PLAIN.get(word, (0, False)))
    a_rank = 0.05 * words["layers"] / words["pp"] + dearer
    return float(0.06 + _ranks(words) * words["steps"] * a_rank * (0.4 + 0.2 * words["micro"]))


def _ranks(words: Words) -> int:
    return math.prod(words[axis] for axis in _AXES)


def _splits(words: Words) -> bool:
    return bool(words["tp"] > 1 or words["wp"] > 1)


def _degenerate(case: Case) -> str:
    """Why a case shows less than another one: too few ranks or too many, a factor that is two sizes."""
    axes = {*case.mesh.values(), case.wp} - {1}
    return "" if 2 <= case.world_size <= RANKS and case.micro not in axes else "ranks or micro-batches"


class Search:
    """Finds cases for pairs that `kept` do not hold; `known` are cases from which it starts."""

    def __init__(self, kept: Sequence[Words], known: Sequence[Words], seed: int) -> None:
        self.kept, self.known, self.random = kept, list(known), random.Random(seed)
        self.domains = paired_domains()
        self._legal: dict[tuple[object, ...], Problem] = {}
        self._pairs: dict[tuple[object, ...], frozenset[Pair]] = {}
        self.examples: dict[Pair, Words] = {}
        every = [(word, value) for word, values in self.domains.items() for value in values]
        pairs = [dict(pair) for pair in combinations(every, 2) if pair[0][0] != pair[1][0]]
        have = self.union(known)
        self.wanted = have | {pair for fixed in pairs for pair in self._possible(fixed, have)}
        self.wanted -= {(pair, False) for pair, splits in self.wanted if splits} | self.union(kept)

    def problem(self, words: Words) -> Problem:
        """Reason against a case: a rule, its number of ranks, or as many micro-batches as ranks on an axis."""
        key = tuple(words.values())
        if key not in self._legal:
            self._legal[key] = problem_of(words, _degenerate)
        return self._legal[key]

    def pairs_of(self, words: Words) -> frozenset[Pair]:
        """The pairs of a case; those with a mode twice where it splits something."""
        key = tuple(words.values())
        if key not in self._pairs:
            levels = [(word, words[word]) for word, values in self.domains.items() if words[word] in values]
            pairs = [
                (frozenset(pair), pair[0][0] == "mode" or pair[1][0] == "mode") for pair in combinations(levels, 2)
            ]
            split = {(pair, True) for pair, of_mode in pairs if of_mode and _splits(words)}
            self._pairs[key] = frozenset(split | {(pair, False) for pair, _ in pairs})
        return self._pairs[key]

    def union(self, cases: Iterable[Words]) -> set[Pair]:
        """All pairs of these cases."""
        return set().union(*map(self.pairs_of, cases))

    def near(self, fixed: Words, needs: bool) -> Words | None:
        """A legal case with these words; one that `needs` to split something does so over few ranks."""

        def unfit(words: Words) -> Problem:
            return self.problem(words) or ("unfit" if needs and not (_splits(words) and _ranks(words) <= _FEW) else "")

        sources = self.random.sample(self.known, min(_NEAR, len(self.known)))
        tries = ((words, search) for search in (False, True) for words in sources[: _NEAR // 6 if search else _NEAR])
        made = (repaired(words, fixed, self.domains, unfit, search=search) for words, search in tries)
        return next(filter(None, made), None)

    def _possible(self, fixed: Words, have: set[Pair]) -> list[Pair]:
        """The pair of these two words as it is wanted, [] where no legal case has it."""
        pair = frozenset(fixed.items())
        for needs in (True, False) if "mode" in fixed else (False,):
            if (pair, needs) in have:
                return [(pair, needs)]
            if example := self.near(fixed, needs):
                self.examples[pair, needs] = example
                return [(pair, needs)]
        return []

    def completed(self, cases: list[Words]) -> list[Words]:
        """The cases and more of them, until no pair is missing."""
        missing = self.wanted - self.union(cases)
        while missing:
            pair = self.random.choice(sorted(missing, key=repr))
            made = [*filter(None, (self.near(dict(pair[0]), pair[1]), self.examples.get(pair)))]
            better = [self.improved(words, dict(pair[0]), missing) for words in made]
            best = max(better, key=lambda words: self.worth(words, missing), default=None)
            missing.discard(pair)
            if best is not None:
                missing -= self.pairs_of(best)
                cases.append(best)
        return cases

    def worth(self, words: Words, missing: set[Pair]) -> float:
        """How many missing pairs a case holds for what it costs."""
        return len(self.pairs_of(words) & missing) / cost(words)

    def improved(self, words: Words, fixed: Words, missing: set[Pair]) -> Words:
        """The case with single words changed, as long as that is worth more."""
        worth, again = self.worth(words, missing), True
        levels = sorted({level for pair, _ in missing for level in pair if level[0] not in fixed}, key=repr)
        while again:
            again = False
            self.random.shuffle(levels)
            for word, value in levels:
                other = self.changed(words, {**{key: words[key] for key in fixed}, word: value})
                if other and (more := self.worth(other, missing)) > worth:
                    words, worth, again = other, more, True
        return words

    def changed(self, words: Words, fixed: Words) -> Words | None:
        """The legal case near this one that has these words, None where the rules propose none."""
        return repaired(words, fixed, self.domains, self.problem)

    def without_idle(self, cases: list[Words]) -> list[Words]:
        """The cases without those of which others hold all that is wanted, the dearest left out first."""
        for words in sorted(cases, key=cost, reverse=True):
            others = [other for other in cases if other is not words]
            if not (self.pairs_of(words) & self.wanted) - self.union(others):
                cases = others
        return cases

    def cheaper(self, cases: list[Words]) -> list[Words]:
        """The list with a few cases found anew, or as it was."""
        out = self.random.sample(range(len(cases)), min(len(cases), self.random.randint(2, _TAKEN_OUT)))
        new = self.without_idle(self.completed([words for place, words in enumerate(cases) if place not in out]))
        lost = (self.wanted & self.union(cases)) - self.union(new)
        return cases if lost or sum(map(cost, new)) > sum(map(cost, cases)) else new

    def plainer(self, cases: Sequence[Words]) -> list[Words]:
        """The cases with single words changed to what costs less, where other cases hold the pairs that go with it."""
        cases = list(cases)
        times = Counter(pair for words in cases for pair in self.pairs_of(words) & self.wanted)
        values = [(word, value) for word in (*_AXES, "micro", *_DEARER) for value in self.domains.get(word, ())]
        for place in sorted(range(len(cases)), key=lambda place: cost(cases[place]), reverse=True):
            for word, value in values:
                words = cases[place]
                other = self.changed(words, {word: value}) if words[word] != value else None
                if other and cost(other) < cost(words):
                    gone, come = ((self.pairs_of(of) & self.wanted) for of in (words, other))
                    if all(times[pair] > 1 for pair in gone - come):
                        times.subtract(gone)
                        times.update(come)
                        cases[place] = other
        return cases


def _with(words: Words, steps: int, layers: Iterable[int]) -> Words:
    """The case with this number of steps and the first of these numbers of layers that is legal."""
    words = {**words, "steps": steps}
    return next((way for way in ({**words, "layers": few} for few in layers) if not problem_of(way)), words)


def _short(words: Words) -> Words:
    """The case with one step and as few layers as it may have."""
    return _with({**words, "micro": 1 if words["micro"] == 2 else words["micro"]}, 1, range(1, 9))


def _long(words: Words) -> Words:
    """The case with two layers, two steps, three where a period is counted, and several micro-batches."""
    steps, fewest = (3 if words["parity"] > 1 else 2), max(2, words["layers"])
    ways = ({**words, "micro": micro} for micro in (words["micro"], 3, 2) if micro > 1)
    return _with(next((way for way in ways if not problem_of(way, _degenerate)), words), steps, range(fewest, 9))


def _lasting(words: Words, of: Iterable[str]) -> set[tuple[str, object]]:
    """The values that a case holds for long enough: its states have a next micro-batch, layer and step to go to."""
    if words["steps"] < 2 or words["layers"] < 2:
        return set()
    short = words["micro"] < 2
    return {
        (word, words[word])
        for word in of
        if not (short and word in _STATES) and not (word == "parity" and words["steps"] <= words[word])
    }


def finished(cases: Sequence[Words], kept: Sequence[Words], words: Iterable[str]) -> list[Words]:
    """The cases with more steps, layers and micro-batches where a value of these words would be in no long case."""
    words = list(words)
    done = set[tuple[str, object]]().union(*(_lasting(case, words) for case in kept))
    longer = [_long(case) for case in cases]
    levels = [_lasting(case, words) for case in longer]
    chosen = set[int]()
    while missing := set().union(*levels) - done:
        best = max(range(len(cases)), key=lambda n: len(missing & levels[n]) / (cost(longer[n]) - cost(cases[n])))
        chosen.add(best)
        done |= levels[best]
    return [longer[number] if number in chosen else case for number, case in enumerate(cases)]


def main() -> int:
    """Search for the given seconds, and write the list down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long to search")
    parser.add_argument("--seed", type=int, default=0, help="another seed goes other ways")
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    kept, before = ([words_of(case) for case in lines()[section]] for section in ("recipes", "pairs"))
    search = Search(
        kept, [short for words in (*before, *kept) if not problem_of(short := _short(words), _degenerate)], asked.seed
    )
    cases = search.without_idle(search.completed([_short(words) for words in before]))
    while time.monotonic() < end:
        cases = search.cheaper(search.plainer(cases))
        print(f"\r{len(cases)} cases, cost {sum(map(cost, cases)):.2f}", end="", flush=True)
    by_hand = FILE.read_text(encoding="utf-8").partition("\npairs:\n")[0]
    new = sorted(line_of(Case(**words)) for words in finished(cases, kept, search.domains))
    FILE.write_text("\n".join([by_hand, "pairs:", *new, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
