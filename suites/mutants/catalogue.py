"""All mutants, by family, the variants beside them, and those that are held back; read from `bugs`.

A family is one or more files of bugs. A run of the held-back ones prints totals and the names of survivors, but never
which of them got which place or cause. Figures of mutants that a rule was fitted to would show nothing.
"""

from dataclasses import replace

from shardproof.bugs.record import FOLDER, files, read
from shardproof.reference.case.variants import words
from shardproof.suites.mutants.mutant import GROUPS, Mutant

_FAMILIES = (
    "reductions boundaries factors norms_and_clip layouts groups vocabulary_and_loss "
    "overlap_and_buffers+exposed+recompute data_and_positions+context optimizer_and_loop steps_and_counts "
    "model_rules optimizer_rules reports orders_and_parts+pipelines randomness+dropped "
    "shares_and_updates+data_parallel+gradients"
).split()
"""Files in `bugs/open` in the order of their rows, those of a family joined; any other file is a family of its own."""


def of_file(name: str) -> tuple[Mutant, ...]:
    """The mutants of one file below `bugs`, without its suffix."""
    return read(FOLDER / f"{name}.txt", Mutant, GROUPS)


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
"""Mutants that whoever writes or changes rules of diagnosis never looks at."""
UNSEEN: tuple[Mutant, ...] = _below("held_back/unseen")
"""Planted bugs of a blind measurement: `case` shows each, `condition` is the words that it needs, `wrong` its cause."""
VARIANT_ROWS: tuple[Mutant, ...] = tuple(
    replace(row, suite=words(row.name), condition="", changes=(), wrong="") for row in of_file("variants")
)
"""The variants as rows of the kill matrix, each planted by its word of the case."""
