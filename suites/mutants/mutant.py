"""A mutant: one real bug as a change of our own source text, planted from outside, and where it can be seen.

`condition` and the words of a mode in `modes` state which cases can show the mutant, in the language of
`reference.case.variants`. The names are the case's own words and what follows from them, and `world`. `wdp` are ranks
that hold the same shard, `padding` rows of the vocabulary that are no token. A mutant is planted in every mode that can
host it.

Every property of the suites draws its cases from `suites.drawing.strategies`, in the number of the profile. The same
number is drawn here, from a fixed seed, smallest first. So a mutant is killed by a case that a property meets.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardproof.bugs.anchors import changed
from shardproof.bugs.planting import Subject, planted, planted_everywhere
from shardproof.bugs.record import Bug, Words
from shardproof.harness.dense_model import SUBJECT
from shardproof.reference.case import Case, CaseError
from shardproof.reference.case.variants import broken
from shardproof.reference.language.core import MODES
from shardproof.suites.drawing.profiles import PROFILES, draw_samples
from shardproof.suites.drawing.strategies import cases

EVERY = tuple(MODES)
TENSOR = tuple(name for name, mode in MODES.items() if not mode.gathers_weights and not mode.uneven)
"""Modes that split the mathematics of a layer and the vocabulary."""
WHOLE = tuple(name for name in TENSOR if not MODES[name].sequence)
"""Tensor-parallel modes whose hidden states are whole on every rank."""
SPLIT = tuple(name for name in TENSOR if MODES[name].sequence)
"""Tensor-parallel modes whose hidden states are split along the sequence."""
GROUPS = {"every": EVERY, "tensor": TENSOR, "whole": WHOLE, "split": SPLIT}
"""Name in a file of bugs -> modes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant(Bug):
    """A planted bug of our own implementation."""

    def shows(self, case: Case) -> bool:
        """Whether this case can show the mutant."""
        return case.mode in self.modes and holds(f"{self.condition} {self.modes[case.mode]}", case)

    def sources(self) -> dict[str, str]:
        """The changed sources. Raises AnchorLost, a ValueError, for lines that do not occur exactly once."""
        return changed(self.name, self.changes)

    @property
    def kind(self) -> str:
        """Kind in the kill matrix: a variant is chosen by a word of the case, and nothing is planted for it."""
        return "mutant" if self.changes else "variant"

    @property
    def is_shared(self) -> bool:
        """Whether it changes what the dense model and the ranks have in common; it is planted in both then."""
        return any(change.module.startswith("shardproof.reference.") for change in self.changes)

    @contextmanager
    def subject(self) -> Iterator[Subject | str]:
        """Our subject with the bug in it; the dense model has it as well, inside, when it lies in what they share."""
        if self.is_shared:
            with planted_everywhere(self.sources()):
                yield SUBJECT
        else:
            yield planted(self.sources()) if self.changes else SUBJECT


def holds(condition: str, case: Case) -> bool:
    """Whether all words of a condition hold for a case. Raises ValueError for a word that cannot be read."""
    return not broken(condition, lambda key: _value(case, key))


def _value(case: Case, key: str) -> object:
    derived: Mapping[str, int] = {
        "world": case.world_size,
        "wdp": case.world_size // (case.wp if MODES[case.mode].gathers_weights else case.tp),
        "padding": 0 if MODES[case.mode].uneven else case.padded_vocab - case.vocab,
    }
    return derived[key] if key in derived else getattr(case, key)


_SEED = 20251121


@cache  # a hundred suites and modes, asked for in turn
def _drawn(mode: str, fixed: tuple[tuple[str, Any], ...]) -> tuple[Case, ...]:
    found = draw_samples(cases(mode, **dict(fixed)), PROFILES["default"], _SEED)
    return tuple(sorted(dict.fromkeys(found), key=work))


def drawn(mode: str, fixed: Words) -> tuple[Case, ...]:
    """The cases of one property in the profile `default`, smallest first; `fixed` words are the property's own."""
    return _drawn(mode, tuple(sorted(fixed.items())))


def cases_showing(mutant: Mutant, mode: str, dtype: str = "") -> tuple[Case, ...]:
    """The drawn cases of this mode that can show the mutant; of `dtype`, unless it shows in others alone."""
    if not dtype:
        return tuple(case for case in drawn(mode, mutant.suite) if mutant.shows(case))
    try:
        cases_of_dtype = drawn(mode, {"dtype": dtype, **mutant.suite})
    except CaseError:  # its property is about words that need another dtype
        cases_of_dtype = ()
    return tuple(case for case in cases_of_dtype if mutant.shows(case)) or cases_showing(mutant, mode)


def work(case: Case) -> int:
    """How long a case takes, in no unit: ranks first, for each has its own pass over the model."""
    return case.world_size * case.layers * case.micro * case.steps * (500 + case.tokens * case.hidden)
