"""All mutants, by family, the variants beside them, and those that are held back; read from `bugs`.

    python -m shardproof.suites.mutants.catalogue [ID ...]    prints known bugs by the id of their cause: these, or all

A family is one or more files of bugs. A run of the held-back ones prints totals and the names of survivors, but never
which of them got which place or cause. Figures of mutants that a rule was fitted to would show nothing.

KNOWN joins parts that stand where they are used. The id of a known bug and its look are in
`harness.diagnosing.causes.cause`, the changes of our source here, the variants of a case in `reference.case.variants`.
Mutants that are held back are not in it.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardproof.bugs.record import FOLDER, files, read
from shardproof.harness.diagnosing.causes.cause import CAUSES
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


_DIAGNOSING, _WITNESSES = "tests/harness/diagnosing", "tests/harness/witnesses"
SHOWN_BY: Mapping[str, str] = {
    "witness": f"{_WITNESSES}/test_witness_agreement.py",
    "not_averaged": f"{_DIAGNOSING}/test_headlines.py",
    "other_samples": "tests/harness/running/test_first_steps.py",
    "machine": f"{_DIAGNOSING}/test_six_lines.py",
}
"""Id of what no open mutant and no variant plants -> the test that plants it in numbers, sightings or ends of a run."""


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
