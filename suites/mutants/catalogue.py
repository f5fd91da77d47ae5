"""All mutants, by family, the variants beside them, and those that are held back; read from `bugs`.

    python -m shardproof.suites.mutants.catalogue [ID ...]    prints known bugs by the id of their cause: these, or all

A mutant is one real bug as a change of our own source text, planted from outside. `condition` and the words of a mode
in `modes` state which cases can show it, in the language of `reference.case.variants`. The names are the case's own
words and what follows from them, and `world`, the number of ranks. `wdp` are ranks that hold the same shard, `padding`
rows of the vocabulary that are no token. A mutant is planted in every mode that can host it.

A family is one or more files of bugs. A run of held-back mutants prints totals and the names of survivors, but never
which mutant got which place or cause: rules that were fitted to these mutants would make the figures worthless.

Every property of the suites draws as many cases from `suites.drawing.strategies` as its profile says. As many as the
profile `default` says are drawn here, from a fixed seed, and tried smallest first. So a mutant is killed by a case
that a property could draw.

KNOWN has all that is known of a kind of bug: its id and how it looks (`harness.diagnosing.causes.cause`), and the
mutants and variants that plant it. Mutants that are held back are not in it.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from shardproof.bugs.anchors import change_sources
from shardproof.bugs.planting import Subject, plant_subject, planted_everywhere
from shardproof.bugs.record import FOLDER, Bug, Words, files, read_bugs
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.diagnosing.causes.cause import CAUSES
from shardproof.reference.case import Case, CaseError
from shardproof.reference.case.variants import find_broken_word, words
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
        return change_sources(self.name, self.changes)

    @property
    def kind(self) -> str:
        """The kind in the kill matrix. A variant is chosen by a word of the case, so it has no changes."""
        return "mutant" if self.changes else "variant"

    @property
    def is_shared(self) -> bool:
        """Whether it changes code that the dense model and the ranks share, so that it is planted in both."""
        return any(change.module.startswith("shardproof.reference.") for change in self.changes)

    @contextmanager
    def subject(self) -> Iterator[Subject | str]:
        """Our subject with the bug in it. A bug in shared code is in the dense model as well, while this is entered."""
        if self.is_shared:
            with planted_everywhere(self.sources()):
                yield SUBJECT
        else:
            yield plant_subject(self.sources()) if self.changes else SUBJECT


def holds(condition: str, case: Case) -> bool:
    """Whether all words of a condition hold for a case. Raises ValueError for a word that cannot be read."""
    return not find_broken_word(condition, lambda key: _value(case, key))


def _value(case: Case, key: str) -> object:
    derived: Mapping[str, int] = {
        "world": case.world_size,
        "wdp": case.world_size // (case.wp if MODES[case.mode].gathers_weights else case.tp),
        "padding": 0 if MODES[case.mode].uneven else case.padded_vocab - case.vocab,
    }
    return derived[key] if key in derived else getattr(case, key)


_SEED = 20251121


@cache  # called for a hundred properties and modes in turn
def _draw_property(mode: str, fixed: tuple[tuple[str, Any], ...]) -> tuple[Case, ...]:
    found = draw_samples(cases(mode, **dict(fixed)), PROFILES["default"], _SEED)
    return tuple(sorted(dict.fromkeys(found), key=work))


def draw_property(mode: str, fixed: Words) -> tuple[Case, ...]:
    """The cases of one property in the profile `default`, smallest first; `fixed` words are the property's own."""
    return _draw_property(mode, tuple(sorted(fixed.items())))


def cases_showing(mutant: Mutant, mode: str, dtype: str = "") -> tuple[Case, ...]:
    """The drawn cases of this mode that can show the mutant; cases of `dtype`, unless only other dtypes show it."""
    if not dtype:
        return tuple(case for case in draw_property(mode, mutant.suite) if mutant.shows(case))
    try:
        cases_of_dtype = draw_property(mode, {"dtype": dtype, **mutant.suite})
    except CaseError:  # the property fixes words that need another dtype
        cases_of_dtype = ()
    return tuple(case for case in cases_of_dtype if mutant.shows(case)) or cases_showing(mutant, mode)


def work(case: Case) -> int:
    """The relative time of a case: ranks count first, since each has its own pass over the model."""
    return case.world_size * case.layers * case.micro * case.steps * (500 + case.tokens * case.hidden)


_FAMILIES = (
    "reductions boundaries factors norms_and_clip layouts groups vocabulary_and_loss "
    "overlap_and_buffers+exposed+recompute data_and_positions+context optimizer_and_loop steps_and_counts "
    "model_rules optimizer_rules reports orders_and_parts+pipelines randomness+dropped "
    "shares_and_updates+data_parallel+gradients"
).split()
"""Files in `bugs/open` in the order of their rows, those of a family joined; any other file is a family of its own."""


def of_file(name: str) -> tuple[Mutant, ...]:
    """The mutants of one file below `bugs`, without its suffix."""
    return read_bugs(FOLDER / f"{name}.txt", Mutant, GROUPS)


def _families() -> dict[str, tuple[Mutant, ...]]:
    known = {name for family in _FAMILIES for name in family.split("+")}
    every = [*_FAMILIES, *(path.stem for path in files("open") if path.stem not in known)]
    parts = [family.split("+") for family in every]
    return {names[0]: tuple(one for name in names for one in of_file(f"open/{name}")) for names in parts}


def _below(folder: str) -> tuple[Mutant, ...]:
    return tuple(one for path in files(folder) for one in of_file(f"{folder}/{path.stem}"))


FAMILIES: dict[str, tuple[Mutant, ...]] = _families()
"""Family -> its mutants."""
MUTANTS: tuple[Mutant, ...] = tuple(mutant for family in FAMILIES.values() for mutant in family)
"""Every mutant that is open."""
HELD_BACK: tuple[Mutant, ...] = _below("held_back")
"""Mutants that nobody looks at who writes or changes rules of diagnosis."""
UNSEEN: tuple[Mutant, ...] = _below("held_back/unseen")
"""Planted bugs of a blind measurement: `case` shows each, `condition` has the words it needs, `wrong` its cause."""
VARIANT_ROWS: tuple[Mutant, ...] = tuple(
    replace(row, suite=words(row.name), condition="", changes=(), wrong="") for row in of_file("variants")
)
"""The variants as rows of the kill matrix, each planted by its word of the case."""


_DIAGNOSING, _WITNESSES = "tests/harness/diagnosing", "tests/harness/witnesses"
SHOWN_BY: Mapping[str, str] = {
    "witness": f"{_WITNESSES}/test_witness_agreement.py",
    "not_averaged": f"{_DIAGNOSING}/test_headlines.py",
    "other_samples": "tests/harness/running/test_first_steps.py",
    "machine": f"{_DIAGNOSING}/test_six_lines.py",
}
"""The id of a cause that no open mutant and no variant plants -> the test that plants it, in numbers or otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBug:
    """A kind of mistake. `looks` is how it shows.

    `planted` are the open mutants and variants for which this cause is right to report.
    """

    id: str
    looks: str
    planted: tuple[Mutant, ...]

    def __str__(self) -> str:
        lines = [f"{self.id}: {self.looks}"]
        lines += [f"    {one.kind} {one.name}: {one.stands_for}" for one in self.planted]
        return "\n".join(lines if self.planted else [*lines, f"    planted in {SHOWN_BY.get(self.id, 'nothing')}"])


KNOWN: Mapping[str, KnownBug] = {
    id: KnownBug(
        id=id, looks=looks, planted=tuple(row for row in (*MUTANTS, *VARIANT_ROWS) if id in row.cause.split("|"))
    )
    for id, looks in CAUSES.items()
}
"""Id -> all that is known of it."""


def main(ids: Sequence[str]) -> int:
    """Print these bugs, all when none is named. Exit status 2 for an unknown id."""
    if unknown := [id for id in ids if id not in KNOWN]:
        print(f"known bugs: {' '.join(unknown)}: no such id; legal: {' '.join(KNOWN)}", file=sys.stderr)
        return 2
    for id in ids or KNOWN:
        print(KNOWN[id])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
