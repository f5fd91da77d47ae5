"""The cases that run when none is given: a plain one of each mode, everyday recipes, and every pair of values.

`default_cases.txt` has the lines. Its pairs are all that a legal case on at most 8 ranks can hold of two words, with
the values of `reference.case.domains`. `python -m bench.default_cases` finds the lines, a test enumerates the pairs.
For other modes, and for a subject that refuses words, the lines are changed as the rules propose.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import cycle
from pathlib import Path
from typing import Any

from shardproof.reference.case.case import Case
from shardproof.reference.case.domains import Problem, Words, domains, problem_of, repair_words, words_of
from shardproof.reference.language.core import MODES
from shardproof.reference.language.words import write

FILE = Path(__file__).with_suffix(".txt")
RANKS = 8
NUMBERS: Mapping[str, int | float] = {
    "hidden": 48,
    "heads": 12,
    "ffn": 28,
    "vocab": 76,
    "seq": 20,
    "batch": 5,
    "lr": 0.1,
    "seed": 1,
}
"""Words that the lines leave out. Sizes differ, and a quarter of heads, ffn, vocab and seq is odd."""
FIXED: Mapping[str, str] = {
    "data": "is the option --data",
    "load": "names a folder: a recipe",
    "save": "names a folder: a recipe",
    "layers": "as few as the case needs, more in cases of two steps",
    "steps": "1, but for cases that hold every value in two steps",
    **{word: "a size of all cases" for word in NUMBERS},
}
"""Words whose pairs are not wanted, and why."""
CHECKPOINT = "CHECKPOINT"
"""Stands for a folder in the lines: some cases save into it, and those after them load from there."""
Refuses = Callable[[Case], str]
Level = tuple[str, Any]


def paired_domains() -> dict[str, tuple[Any, ...]]:
    """The words whose pairs are wanted, each with its values; not micro=2, which would equal most axes' ranks."""
    found = {word: values for word, values in domains().items() if word not in FIXED}
    return found | {"micro": tuple(count for count in found["micro"] if count != 2)}


@lru_cache(maxsize=1)
def lines() -> Mapping[str, tuple[Case, ...]]:
    """The stored cases of every section: recipes, pairs. A line has the words that differ from NUMBERS."""
    found: dict[str, list[Case]] = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text.endswith(":"):
            section = found.setdefault(text[:-1], [])
        elif text:
            section.append(Case.of(**{**NUMBERS, **Case.read_words(text)}))
    return {name: tuple(cases) for name, cases in found.items()}


def line_of(case: Case) -> str:
    """The line of a case: its words that differ from NUMBERS."""
    own = [word for word in str(case).split() if word.partition("=")[0] not in NUMBERS]
    return " ".join(
        [*own, *(f"{word}={write(value)}" for word in NUMBERS if (value := getattr(case, word)) != NUMBERS[word])]
    )


def plain_cases(mode: str) -> tuple[Case, ...]:
    """Cases of a mode on 2 and 4 ranks without words that few implementations know."""
    case = _plain(mode)[0]
    return case, case.but(dp=2), case.but(tp=4, kv_heads=4)


def _plain(mode: str) -> list[Case]:
    """Cases of this mode with few words, the model of its own system first: Megatron's, InternEvo's, OPT."""
    return [Case.of(**words, mode=mode, micro=3) for words in MODES[mode].presets]


def default_cases(
    modes: Sequence[str] = tuple(MODES), refuses: Refuses = lambda case: "", *, deep: bool = False, checkpoint: str = ""
) -> tuple[Case, ...]:
    """The default cases of these modes: a plain one of each, recipes, and those that have every pair.

    `refuses` is a subject's reason against a case, or "": the stored cases are changed until it takes them. Each stored
    case comes before those with fewer new pairs, so that a failure is found early. `deep`: every stored case in every
    mode, with at least two layers and two steps. `checkpoint` is the folder of the recipes that save and load. Without
    it, with `deep`, and where a case of a recipe is refused, the first case runs without saving and the others are left
    out.
    """
    plain = [min(_plain(mode), key=lambda case: bool(refuses(case))) for mode in modes]
    stored = [case for section in lines().values() for case in section if not case.save and not case.load]
    moved: list[Case] = []
    for chain in _checkpoints():
        cases = [
            case.but(**{word: getattr(case, word).replace(CHECKPOINT, checkpoint) for word in ("save", "load")})
            for case in chain
        ]
        if checkpoint and not deep and not any(case.mode not in modes or refuses(case) for case in cases):
            moved += cases
        else:
            stored.append(chain[0].but(save=""))
    if not deep and {*modes} == {*MODES} and not any(map(refuses, stored)):
        return (*plain, *moved, *(case for case, _ in _in_order(stored)))
    changes = _Changes(modes, refuses, plain)
    places = (
        [(case, mode) for case in stored for mode in modes]
        if deep
        else list(zip(stored, _modes_of(stored, modes), strict=True))
    )
    long = {case: {"steps": max(2, case.steps), "layers": max(2, case.layers)} if deep else {} for case in stored}
    found = dict.fromkeys(filter(None, (changes.make(case, {"mode": mode, **long[case]}) for case, mode in places)))
    return (*plain, *moved, *(found if deep else _cover_pairs(found)))


def _checkpoints() -> list[list[Case]]:
    """The recipes of every checkpoint: one that saves it, and those after it, each of which loads what the one before
    saved.
    """
    found: list[list[Case]] = []
    for case in lines()["recipes"]:
        if case.load:
            found[-1].append(case)
        elif case.save:
            found.append([case])
    return found


def _modes_of(cases: Sequence[Case], modes: Sequence[str]) -> Iterator[str]:
    """The mode of every case: its own, or else the modes in turn."""
    others = cycle(modes)
    return (case.mode if case.mode in modes else next(others) for case in cases)


class _Changes:
    """Changes cases until a subject takes them."""

    def __init__(self, modes: Sequence[str], refuses: Refuses, plain: Sequence[Case]) -> None:
        self._modes, self._refuses = modes, refuses
        self._domains = domains()
        base = words_of(plain[0])
        small = {**base, **NUMBERS}
        self._sizes = {word: base[word] for word in NUMBERS} if self._problem(small) and not self._problem(base) else {}
        self._plain = {**base, **NUMBERS, **self._sizes, "layers": 1, "steps": 1}
        self._refused = {
            (word, value)
            for word, values in self._domains.items()
            for value in values
            if self._refused_alone(word, value)
        }

    def _problem(self, words: Words) -> Problem:
        """The rule that a case breaks, or the subject's reason against it."""

        def reason(case: Case) -> str:
            if case.mode not in self._modes or not 2 <= case.world_size <= RANKS:
                return "another mode or mesh"
            return self._refuses(case)

        return problem_of(words, reason)

    def _refused_alone(self, word: str, value: Any) -> bool:
        """Whether the subject refuses a plain case with this value."""
        legal = repair_words(self._plain, {word: value}, self._domains)
        return bool(legal and self._refuses(Case(**legal)))

    def make(self, case: Case, fixed: Words) -> Case | None:
        """The case with these words, and with others changed until it is taken; None if no such case is found."""
        words = {**words_of(case), **self._sizes}
        found = repair_words(words, fixed, self._domains, self._problem)
        if not found:
            known = {word: self._plain[word] for word, value in words.items() if (word, value) in self._refused}
            found = repair_words({**words, **known}, fixed, self._domains, self._problem, search=True)
        return Case(**found) if found else None


def _cover_pairs(cases: Iterable[Case]) -> list[Case]:
    """A few of these cases with all the pairs of values that they have together, chosen greedily by pairs per rank."""
    return [case for case, more in _in_order(cases, lambda case: 2 + case.world_size) if more]


def _in_order(cases: Iterable[Case], price: Callable[[Case], int] = lambda case: 1) -> Iterator[tuple[Case, int]]:
    """These cases in greedy order, the most new pairs for the cost first, each with the number of its new pairs."""
    varied, ordered = paired_domains(), list(dict.fromkeys(cases))
    numbers: dict[Level, int] = {}
    levels = [
        [
            numbers.setdefault((word, value), len(numbers))
            for word, values in varied.items()
            if (value := getattr(case, word)) in values
        ]
        for case in ordered
    ]
    bits = [sum(1 << number for number in own) for own in levels]
    missing = [0] * len(numbers)
    for held, own in zip(bits, levels, strict=True):
        for number in own:
            missing[number] |= held

    def more(place: int) -> int:
        held = bits[place]
        return sum((missing[number] & held).bit_count() for number in levels[place])

    left = [(-more(place) / price(case), place) for place, case in enumerate(ordered)]
    heapify(left)
    while left:  # the number of new pairs of a case only shrinks, so only the first one is counted again
        _, place = heappop(left)
        now = more(place)
        if left and now / price(ordered[place]) < -left[0][0]:
            heappush(left, (-now / price(ordered[place]), place))
            continue
        yield ordered[place], now
        others = ~bits[place]
        for number in levels[place]:
            missing[number] &= others
