"""A mutant: one real bug as a change of our own source text, planted from outside, and where it can be seen.

`condition` and the words of a mode in `modes` say which cases can show the mutant. They are words like those of a case,
each one of

    key=value  key=a|b  key!=value  key>n  key<n        n: a number or another key

over the case's own words and what follows from them: `world`, `wdp` (ranks that hold the same shard), `padding` (rows
of the vocabulary that are no token), `KEY_rest` (what tp leaves over of a number). A mutant is planted in every mode
that can host it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from reference.case import Case
from reference.case.modes import MODES
from suites.mutants.planting import Subject, planted, planted_everywhere, source_of

Words = Mapping[str, int | float | bool | str]
"""Words of a case as values."""
OURS = "parallel.subject:subject"
EVERY = tuple(MODES)
TENSOR = tuple(name for name, mode in MODES.items() if not mode.gathers_weights and not mode.uneven)
"""Modes that split the mathematics of a layer and the vocabulary."""
WHOLE = tuple(name for name in TENSOR if not MODES[name].sequence)
"""Tensor-parallel modes whose hidden states are whole on every rank."""
SPLIT = tuple(name for name in TENSOR if MODES[name].sequence)
"""Tensor-parallel modes whose hidden states are split along the sequence."""

_WORD = re.compile(r"(\w+)(!=|[=<>])(\S+)")
_ORDER: Mapping[str, Callable[[float, float], bool]] = {"<": operator.lt, ">": operator.gt}


def everywhere(words: str = "", modes: tuple[str, ...] = EVERY) -> dict[str, str]:
    """These modes, under the same words."""
    return dict.fromkeys(modes, words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The one occurrence of `old` in the source of `module` reads `new`."""

    module: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted bug.

    stands_for  the real bug: its row in the catalogue of bugs (B-..) or its source, and the system
    modes       mode that can host it -> words that its cases need there
    condition   words that its cases need in every mode
    suite       words that the property fixes whose cases show it ("" for most: any property with the check `kills`)
    kills       the check that must kill it, in every mode; "run" when it ends the run
    alone       no other check may fail: this mutant shows that `kills` is needed
    phase       of the first place where it goes wrong; several possible ones are separated by "|"
    region      module of that place, with * and ? as in file names, "|" as above; "" is no module
    cause       ids that are right to report (harness.diagnosing.rules.causes), "|" as above; "" when all would mislead
    equivalent  why no outcome and no ledger of any legal case can differ, for a mutant that cannot be killed
    held_back   kept from whoever writes rules of diagnosis (suites.mutants.held_back sets it)
    """

    name: str
    stands_for: str
    modes: Mapping[str, str]
    changes: tuple[Change, ...]
    condition: str = ""
    suite: Words = field(default_factory=dict)
    kills: str = ""
    alone: bool = False
    phase: str = ""
    region: str = ""
    cause: str = ""
    equivalent: str = ""
    held_back: bool = False

    def shows(self, case: Case) -> bool:
        """Whether this case can show the mutant."""
        return case.mode in self.modes and holds(f"{self.condition} {self.modes[case.mode]}", case)

    def sources(self) -> dict[str, str]:
        """The changed sources. Raises ValueError when a text to change does not occur exactly once."""
        texts: dict[str, str] = {}
        for change in self.changes:
            text = texts.get(change.module) or source_of(change.module)
            if text.count(change.old) != 1:
                raise ValueError(f"{self.name}: {text.count(change.old)} times in {change.module}: {change.old!r}")
            texts[change.module] = text.replace(change.old, change.new)
        return texts

    @property
    def kind(self) -> str:
        """What the kill matrix calls it: a variant is chosen by a word of the case, and nothing is planted for it."""
        return "mutant" if self.changes else "variant"

    @property
    def is_shared(self) -> bool:
        """Whether it changes what the dense model and the ranks have in common; it is planted in both then."""
        return any(change.module.startswith("reference.") for change in self.changes)

    @contextmanager
    def subject(self) -> Iterator[Subject | str]:
        """Our subject with the bug in it; the dense model has it as well, inside, when it lies in what they share."""
        if self.is_shared:
            with planted_everywhere(self.sources()):
                yield OURS
        else:
            yield planted(self.sources()) if self.changes else OURS


def holds(condition: str, case: Case) -> bool:
    """Whether all words of a condition hold for a case. Raises ValueError for a word that cannot be read."""
    return all(_holds(word, case) for word in condition.split())


def _holds(word: str, case: Case) -> bool:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ValueError(f"condition={word}: must be key=value, key!=value, key>n or key<n; legal: tp>2")
    key, sign, said = match.groups()
    value = _value(case, key)
    if sign in _ORDER:
        return _ORDER[sign](float(str(value)), float(str(_value(case, said) if said.isidentifier() else said)))
    number = isinstance(value, int) and not isinstance(value, bool)
    written = [_text(_value(case, part)) if number and part.isidentifier() else part for part in said.split("|")]
    return (_text(value) in written) == (sign == "=")


def _value(case: Case, key: str) -> object:
    derived = {
        "world": case.world_size,
        "wdp": case.world_size // (case.wp if MODES[case.mode].gathers_weights else case.tp),
        "padding": 0 if MODES[case.mode].uneven else case.padded_vocab - case.vocab,
    }
    if key.endswith("_rest"):
        return int(getattr(case, key.removesuffix("_rest"))) % case.tp
    return derived[key] if key in derived else getattr(case, key)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
