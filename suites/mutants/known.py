"""Known bugs, one catalogue by the id under which a diagnosis reports them: looks how, planted how, stands for what.

    python -m shardproof.suites.mutants.known [ID ...]        prints these, or all

The parts stand where they are used, and this table joins them. The id and its look are in
`harness.diagnosing.causes.cause`. The changes of our source are in `suites.mutants.catalogue`, the variants of a case
in `reference.case.variants`. Mutants that are held back are not in it.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardproof.harness.diagnosing.causes.cause import CAUSES
from shardproof.suites.mutants.catalogue import MUTANTS, VARIANT_ROWS
from shardproof.suites.mutants.mutant import Mutant

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
