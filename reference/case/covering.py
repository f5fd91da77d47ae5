"""The cases that run when none is given: per mode a short list that covers the words of the case language in pairs.

Many bugs show only with a word that is not the default (overlap=false, fuse_qkv=false), others only with two of them.
So the list of a mode has every value that is not a default, and every two such values of different words together in
one case, wherever the rules allow it. `deep` covers every pair of values, default ones included, and more meshes.
Words of the schemes that compose with a mode have every value once (`reference.case.written`).

The words are the fields of `Case`: a boolean has two values, a word those of `rules.legal_words`, a number those of
NUMBERS. A field without values that is in neither SHARED nor FIXED raises LookupError: no new word is forgotten. The
first cases of a list follow a design for the words of several values (`reference.case.designs`), and the other words
join them. Pairs that are missing then are found greedily: each further case starts from a pair that is not covered yet
and changes single words as long as more pairs become covered (the idea of Cohen et al., "The AETG System", IEEE TSE 23,
1997). At last words that a case need not have change once more, so that the list holds as many of the other pairs,
those with a default, as its cases can. As few cases have a second layer or step as show every value.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice, permutations, product
from typing import Any

from reference.case.case import Case, CaseError
from reference.case.modes import MODES
from reference.case.rules import legal_words, write
from reference.case.schemes import SCHEMES
from reference.case.written import SHARED, spread_cases, written

__all__ = ["FIXED", "NUMBERS", "SHARED", "covering_cases", "paired_cases", "plain_cases"]

Value = int | float | bool | str
Refuses = Callable[[Case], str]
Choice = tuple[int, ...]
"""One case of a list: the level of every word that varies, in their order. A level is a word with one of its values,
as its place in `_Space.levels`.
"""
Pair = tuple[int, int]

FIXED: Mapping[str, str] = {
    "preset": "stands for other words",
    "mode": "each mode has its own list",
    "data": "is the option --data",
    "load": "names a folder",
    "save": "names a folder",
    "variant": "is wrong on purpose: the option --variant",
    "dtype": "float64 shows errors of 1e-9",
    "layers": "2: the first is not the last; 1 where others have its values and none is gathered ahead",
    "steps": "2: the second starts from updated weights; 1 where others have its values, for the cost is in proportion",
    **{word: f"of {name}: `spread_cases`" for name, one in SCHEMES.items() for word in one.words},
    **dict.fromkeys(SCHEMES["randomness"].words, "of randomness, which has proved cases of its own"),
    "order": "numbers the same ranks otherwise: `spread_cases`",
    "loss_scale": "scales with a scaler only: `spread_cases`",
}
"""Words that keep their default, and why."""
NUMBERS: Mapping[str, tuple[Value, ...]] = {
    "tp": (2, 4),
    "dp": (1, 2),
    "wp": ("tp", "other"),
    "kv_heads": (2, 8),
    "clip": (0.0, 0.1),
    "label_smoothing": (0.0, 0.1),
}
"""Values of the other numbers. Of wp: the size of tp, or another one."""
_RANKS, _DEEP_RANKS = 4, 8
_STARTS = 4
"""From how many uncovered pairs a case is built before the best of them is kept."""
_WANTED, _WELCOME = 1000, 1
"""What covering a pair is worth: one that the list must have, and one that it has where that takes no case more."""


def covering_cases(mode: str, refuses: Refuses = lambda case: "", *, deep: bool = False) -> tuple[Case, ...]:
    """The default cases of a mode on 2 and 4 ranks: a plain one, those that cover the pairs, those of other schemes.

    `deep`: more of both, on up to 8 ranks. `refuses` is a subject's reason against a case, "" for none. Raises
    LookupError for a word of the case language without values.
    """
    spread = spread_cases(mode, paired_cases(mode, refuses) if deep else ())
    return (*paired_cases(mode, refuses, deep=deep), *(case for case in spread if not refuses(case)))


def paired_cases(mode: str, refuses: Refuses = lambda case: "", *, deep: bool = False) -> tuple[Case, ...]:
    """The default cases of a mode without other schemes: a plain one, then those that cover the pairs.

    `deep`: every pair of values, on up to 8 ranks. `refuses` is a subject's reason against a case, "" for none. Pairs
    that no legal case has, or that the subject refuses in every case, are left out; a plain case is there even then.
    Raises LookupError for a word of the case language without values.
    """
    if MODES[mode].brief and not deep:
        return (*_first(mode, refuses), *(case for case in written(mode, MODES[mode].brief) if not refuses(case)))
    ranks = _DEEP_RANKS if deep else _RANKS
    space = _Space(mode, refuses, ranks, SHARED)
    if not space.usual():  # a subject that is built for other sizes: those of a plain case, then
        space = _Space(mode, refuses, ranks, {"micro": SHARED["micro"]})
    plain = _first(mode, refuses)
    default = set(space.choice(Case.of(mode=mode)))
    holding = space.holding()
    worth = [[0] * len(space.levels) for _ in space.levels]
    for a, b in holding:
        worth[a][b] = worth[b][a] = _WELCOME if not deep and default & {a, b} else _WANTED
    missing = [list(row) for row in worth]  # worth of pairs that are not covered yet
    ready = [space.choice(case) for case in plain if not refuses(case)]
    for choice in ready:
        _cover(choice, missing)
    found = space.designed(() if deep else MODES[mode].design, missing)
    while wanted := [(a, b) for a, b in holding if missing[a][b] == _WANTED]:
        left = {pair: sum(missing[pair[0]]) + sum(missing[pair[1]]) for pair in wanted}
        starts = sorted(wanted, key=lambda pair: left[pair])[:_STARTS]
        built = [space.improved(holding[start], missing) for start in starts]
        best = max(built, key=lambda choice: sum(missing[a][b] for a, b in combinations(choice, 2)))
        _cover(best, missing)
        found.append((best, best))
    choices = space.spread(found, ready, worth)
    words = set(chain(*choices)).difference(default, *ready)
    words -= {level for level in words if space.levels[level][0] == "family"}  # gives other words their defaults
    cost = {choice: case.world_size * (1 + case.packed) for choice in choices if (case := space.case(choice))}
    twice = choices if deep else _covering(words, cost)
    less = {"steps": 1} if MODES[mode].gathers_weights else {"layers": 1, "steps": 1}
    once = (choice not in twice and space.case(choice, **less) for choice in choices)
    return (*plain, *filter(None, (one or space.case(choice) for one, choice in zip(once, choices, strict=True))))


def _covering(wanted: set[int], cost: Mapping[Choice, int]) -> Sequence[Choice]:
    """The fewest choices that have all these levels; of those, the ones that cost least together."""
    numbers = range(len(cost) + 1)
    covers = ([taken for taken in combinations(cost, n) if wanted <= set(chain(*taken))] for n in numbers)
    return min(next(filter(None, covers)), key=lambda taken: sum(cost[choice] for choice in taken))


def _first(mode: str, refuses: Refuses) -> list[Case]:
    """The plain case that is taken: the first that is not refused, if any."""
    return sorted(_plain(mode), key=lambda case: bool(refuses(case)))[:1]


def plain_cases(mode: str) -> tuple[Case, ...]:
    """Cases of a mode on 2 and 4 ranks with no word that an implementation must have been written for."""
    case = _plain(mode)[0]
    return case, case.but(dp=2), case.but(tp=4, kv_heads=4)


def _plain(mode: str) -> list[Case]:
    """Cases of this mode with few words, the model of its own system first: Megatron's, InternEvo's, OPT."""
    return [Case.of(**words, mode=mode, micro=SHARED["micro"]) for words in MODES[mode].presets]


def _cover(choice: Sequence[int], worth: list[list[int]]) -> None:
    """The pairs of this choice are covered: nothing more is gained by them."""
    for a in choice:
        for b in choice:
            worth[a][b] = 0


class _Space:
    """All choices of one mode, and the cases that they make. `number` is the place of every level in `levels`."""

    def __init__(self, mode: str, refuses: Refuses, ranks: int, shared: Mapping[str, int | float]) -> None:
        self._mode, self._refuses, self._ranks, self._shared = mode, refuses, ranks, shared
        self._values = _values(mode)
        self._cases: dict[tuple[Any, ...], Case | None] = {}
        self.levels = [(word, value) for word, values in self._values.items() for value in values]
        self.number = {level: number for number, level in enumerate(self.levels)}
        self._places = [[self.number[word, value] for value in values] for word, values in self._values.items()]

    def choice(self, case: Case) -> Choice:
        """The levels of a case."""
        return tuple(self.number[level] for level in self.words_of(case).items())

    def words_of(self, case: Case) -> dict[str, Value]:
        """The words of a case that vary here, each with its value."""
        own = {word: getattr(case, word) for word in self._values}
        return own | ({"wp": "tp" if case.wp == case.tp else "other"} if "wp" in own else {})

    def case(self, choice: Choice, **more: int) -> Case | None:
        """The case of this choice with these further words, None when there is none."""
        known = (choice, *more.items())
        if known not in self._cases:
            words = {word: value for word, value in map(self.levels.__getitem__, choice)}
            self._cases[known] = self._made({**words, **more})
        return self._cases[known]

    def _made(self, words: dict[str, Any]) -> Case | None:
        tp, ranks = words["tp"], words["tp"] * words["dp"]
        if ranks > self._ranks:
            return None
        if "wp" in words:
            others = (size for size in range(2, ranks + 1) if ranks % size == 0 and size != tp)
            words["wp"] = tp if words["wp"] == "tp" else next(others, 1)
        try:
            case = Case(**{**words, **self._shared, "mode": self._mode})
        except CaseError:
            return None
        return None if self._refuses(case) else case

    def holding(self) -> dict[Pair, Choice]:
        """Every pair of levels that a case can have, and a choice that has it."""
        usual = self.usual()
        single = {level: self._completed(usual, (level,)) for level in range(len(self.levels))}
        pairs: dict[Pair, Choice] = {}
        for a, b in combinations(single, 2):
            with_a, with_b = single[a], single[b]
            if with_a and with_b and self.levels[a][0] != self.levels[b][0]:
                found = self._completed([*usual, with_a, with_b], (a, b))
                pairs |= {(a, b): found} if found else {}
        return pairs

    def usual(self) -> list[Choice]:
        """The choices of the plain cases; where none is legal, the first legal one two words away from them."""
        plain = [self.choice(case) for case in _plain(self._mode)]
        near = [other for choice in plain for other in self._neighbours(choice, {})]
        far = (other for choice in near for other in self._neighbours(choice, {}))
        found = [choice for choice in plain if self.case(choice)]
        return found or list(islice(filter(self.case, chain(near, far)), 1))

    def _completed(self, choices: Iterable[Choice], pinned: tuple[int, ...]) -> Choice | None:
        """A legal choice with these levels: one of `choices` but for them, with one more word changed if need be."""
        words = list(self._values)
        fixed = {words.index(self.levels[level][0]): level for level in pinned}
        near = [tuple(fixed.get(place, level) for place, level in enumerate(choice)) for choice in choices]
        changed = (other for choice in near for other in self._neighbours(choice, fixed))
        return next((choice for choice in chain(near, changed) if self.case(choice)), None)

    def _neighbours(self, choice: Choice, fixed: Mapping[int, int]) -> Iterator[Choice]:
        """The choices that differ from this one in one word, at none of the fixed places."""
        for place, levels in enumerate(self._places):
            if place not in fixed:
                yield from ((*choice[:place], level, *choice[place + 1 :]) for level in levels)

    def designed(self, rows: Iterable[str], missing: list[list[int]]) -> list[tuple[Choice, Collection[int]]]:
        """A choice for every row of a design, with that row's levels; rows that no case has or needs are left out."""
        found: list[tuple[Choice, Collection[int]]] = []
        for row in rows:
            said = dict(word.split("=") for word in row.split())
            pinned = tuple(self.number[level] for level in self.levels if write(level[1]) == said.get(level[0]))
            start = self._completed(self.usual(), pinned) if len(pinned) == len(said) else None
            best = None if start is None else self.improved(start, missing, pinned)
            if best and any(missing[a][b] == _WANTED for a, b in combinations(best, 2)):
                _cover(best, missing)
                found.append((best, pinned))
        return found

    def improved(self, choice: Choice, worth: Sequence[Sequence[int]], fixed: Collection[int] = ()) -> Choice:
        """The choice with one word after the other changed, as long as its uncovered pairs are worth more; but for the
        levels that are fixed.
        """
        before = None
        while choice != before:
            before = choice
            for place, levels in enumerate(self._places):
                for level in levels if choice[place] not in fixed else ():
                    rest = (*choice[:place], *choice[place + 1 :])
                    gain = sum(map(worth[level].__getitem__, rest)) - sum(map(worth[choice[place]].__getitem__, rest))
                    if gain > 0 and self.case(changed := (*choice[:place], level, *choice[place + 1 :])):
                        choice = changed
        return choice

    def spread(
        self,
        found: Sequence[tuple[Choice, Collection[int]]],
        ready: Iterable[Choice],
        worth: Sequence[Sequence[int]],
    ) -> list[Choice]:
        """The choices with single words changed, but for the levels beside each, as long as all choices cover more
        together with those that are `ready`.
        """
        choices, fixed = [choice for choice, _ in found], [pinned for _, pinned in found]
        held = Counter(pair for choice in chain(choices, ready) for pair in permutations(choice, 2))

        def gain(old: int, new: int, rest: Choice) -> int:
            gained = sum(worth[new][other] for other in rest if not held[new, other])
            return gained - sum(worth[old][other] for other in rest if held[old, other] == 1)

        before = None
        while choices != before:
            before = list(choices)
            for number, place, level in product(range(len(choices)), range(len(self._places)), range(len(self.levels))):
                choice = choices[number]
                old, rest = choice[place], (*choice[:place], *choice[place + 1 :])
                if level == old or old in fixed[number] or level not in self._places[place]:
                    continue
                if gain(old, level, rest) > 0 and self.case(changed := (*choice[:place], level, *choice[place + 1 :])):
                    held.subtract(permutations(choice, 2))
                    held.update(permutations(changed, 2))
                    choices[number] = changed
        return choices


def _values(mode: str) -> dict[str, tuple[Value, ...]]:
    """Every word that varies in this mode -> its values."""
    values: dict[str, tuple[Value, ...]] = {}
    words = legal_words()
    for field in dataclasses.fields(Case):
        word = field.name
        if word in FIXED or word in SHARED or (word == "wp" and not MODES[mode].gathers_weights):
            continue
        known = (False, True) if isinstance(field.default, bool) else words.get(word) or NUMBERS.get(word)
        if known is None:
            raise LookupError(f"word {word}: has no values to cover; legal: an entry in NUMBERS, SHARED or FIXED")
        values[word] = known
    return values
