"""All mutants, by family, the variants beside them, and those that are held back; read from `bugs`.

    python -m shardproof.suites.mutants.catalogue [ID ...]    prints known bugs by the id of their cause: these, or all

A mutant is one real bug as a change of our own source text, planted from outside. `condition` and the words of a mode
in `modes` state which cases can show it, in the language of `reference.case.conditions`. The names are the case's own
words and what follows from them, and `world`. `wdp` are ranks that hold the same shard, `padding` rows of the
vocabulary that are no token. A mutant is planted in every mode that can host it.

A family is one or more files of bugs. A run of the held-back ones prints totals and the names of survivors, but never
which of them got which place or cause. Figures of mutants that a rule was fitted to would show nothing.

Every property of the suites draws its cases from `suites.drawing.strategies`, in the number of the profile. The same
number is drawn here, from a fixed seed, smallest first. So a mutant is killed by a case that a property meets.

KNOWN joins parts that stand where they are used. The id of a known bug and its look are in
`harness.diagnosing.causes.cause`, the changes of our source here, the variants of a case in `reference.case.variants`.
Mutants that are held back are not in it.

The catalogue of real bugs: planted bugs whose record names a public issue or pull request, as one page.

    python -m shardproof.suites.mutants.catalogue [RUN]      writes docs/catalogue.md; RUN: a folder of
                                                         `shardproof faults --field`, without which the figures stay
    python -m shardproof.suites.mutants.catalogue --csv      prints its rows for other tools, alternatives separated by "|"

Everything but what was measured follows from the records. Bugs that no case can show are not in it, nor are those that
are held back: `shardproof faults --field` measures these apart.
"""

import csv
import hashlib
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardproof.bugs.anchors import change_sources
from shardproof.bugs.planting import Subject, plant_subject, planted_everywhere
from shardproof.bugs.record import FOLDER, Bug, Words, files, read_bugs
from shardproof.bugs.references import defect
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.diagnosing.causes.cause import CAUSES
from shardproof.harness.injecting import MISLEADING, NO, Kill, figures
from shardproof.reference.case import Case, CaseError
from shardproof.reference.case.variants import VARIANTS, find_broken_word, words
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


@cache  # a hundred suites and modes, asked for in turn
def _draw_property(mode: str, fixed: tuple[tuple[str, Any], ...]) -> tuple[Case, ...]:
    found = draw_samples(cases(mode, **dict(fixed)), PROFILES["default"], _SEED)
    return tuple(sorted(dict.fromkeys(found), key=work))


def draw_property(mode: str, fixed: Words) -> tuple[Case, ...]:
    """The cases of one property in the profile `default`, smallest first; `fixed` words are the property's own."""
    return _draw_property(mode, tuple(sorted(fixed.items())))


def cases_showing(mutant: Mutant, mode: str, dtype: str = "") -> tuple[Case, ...]:
    """The drawn cases of this mode that can show the mutant; of `dtype`, unless it shows in others alone."""
    if not dtype:
        return tuple(case for case in draw_property(mode, mutant.suite) if mutant.shows(case))
    try:
        cases_of_dtype = draw_property(mode, {"dtype": dtype, **mutant.suite})
    except CaseError:  # its property is about words that need another dtype
        cases_of_dtype = ()
    return tuple(case for case in cases_of_dtype if mutant.shows(case)) or cases_showing(mutant, mode)


def work(case: Case) -> int:
    """How long a case takes, in no unit: ranks first, for each has its own pass over the model."""
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

    `plant_subject` are the open mutants and variants for which this cause is right to report.
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


PAGE = Path(__file__).resolve().parents[2] / "docs" / "catalogue.md"
VERSION = "1"
"""Of the page's form and rules: what counts as a match, and what its columns mean."""
MEASURED = "\n## Measured\n"
"""Begins what a run of `shardproof faults --field` said; all above it follows from the records."""
_HEAD = """# A catalogue of real bugs

Version {version}: {bugs} planted bugs of {public} public issues and pull requests in {systems} repositories.

This page is generated. Each bug changes a few lines of ours so that they do what the issue describes; `bugs/open/` and
`bugs/variants.txt` have the lines. Cite it as "shardproof, catalogue of real bugs, version {version}"; the letters
are a digest of the rows.

    shardproof faults --field                        # plants each of them, and runs each case without its bug
    shardproof faults --field --emit-repro all DIR   # writes those that a returned tensor shows as scripts
    python -m shardproof.suites.mutants.catalogue        # writes this page; with --csv prints its rows, for other tools

What counts: the mechanism is that of the issue, as read in excerpts of it or of its fix. A record that resembles an
issue in another place is marked as its kin, and is not here. Nor is what no case can show. Several records may be of
one issue: of two ways to read it, or of two of its items.
"""
_BUGS = ("planted bug", "reference", "what was wrong")
_WHERE = ("planted bug", "seen by", "first place", "cause")
_SEEN = """## What sees them

The columns name a check that must fail (`|`: one of these) and the first place that is right to name. The last one has
the causes that are right to report first; "-": each would mislead.
"""


def in_field(row: Mutant) -> bool:
    """Whether a planted bug counts: its record names a public reference, and a case can show it."""
    return bool(row.references) and not row.equivalent


FIELD: tuple[Mutant, ...] = tuple(row for row in (*MUTANTS, *VARIANT_ROWS) if in_field(row))
"""The planted bugs of the catalogue."""


def public(rows: Sequence[Mutant] = FIELD) -> tuple[str, ...]:
    """Their references, each once."""
    return tuple(dict.fromkeys(name for row in rows for name in row.references))


def page(rows: Sequence[Mutant] = FIELD) -> str:
    """The page without what was measured."""
    named = public(rows)
    systems = len({name.partition("#")[0] for name in named})
    head = _HEAD.format(version=_version(rows), bugs=len(rows), public=len(named), systems=systems)
    bugs = [(f"`{row.name}`", ", ".join(map(_link, row.references)), _defect(row)) for row in rows]
    places = [" of ".join(filter(None, (row.phase, row.region or "no module"))) for row in rows]
    seen = [(f"`{row.name}`", row.kills, at, row.cause or "-") for row, at in zip(rows, places, strict=True)]
    addresses = [f"{_link(name)}: https://github.com/{name.replace('#', '/issues/')}" for name in named]
    return "\n".join([head, *_table(_BUGS, bugs), _SEEN, *_table(_WHERE, seen), *addresses, ""])


def _version(rows: Sequence[Mutant] = FIELD) -> str:
    return f"{VERSION}.{hashlib.sha256(repr([*map(_cells, rows)]).encode()).hexdigest()[:8]}"


def _cells(row: Mutant) -> tuple[str, ...]:
    named, modes = " ".join(row.references), " ".join(row.modes)
    return row.name, named, _defect(row), modes, row.kills, row.phase, row.region, row.cause


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(columns), "|---" * len(columns) + "|", *map(_row, rows), ""]


def as_csv(rows: Sequence[Mutant] = FIELD) -> str:
    """The rows with the version of the catalogue, as CSV: REPOSITORY#N separated by spaces."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("version", "name", "references", "what", "modes", "seen_by", "phase", "region", "cause"))
    writer.writerows((_version(rows), *_cells(row)) for row in rows)
    return text.getvalue()


def _defect(row: Mutant) -> str:
    return VARIANTS[row.name].wrong if row.name in VARIANTS else defect(row.stands_for)


def _link(name: str) -> str:
    return f"[{name.partition('/')[2]}]"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def measure_folder(folder: Path) -> str:
    """Findings of a run of `shardproof faults --field`: its command, its figures, and every row that is not right."""
    with (folder / "kill_matrix.csv").open(newline="", encoding="utf-8") as file:
        rows = [Kill.of(row) for row in csv.DictReader(file)]
    env = json.loads((folder / "env.json").read_text(encoding="utf-8"))
    held_back = [row for row in rows if row.held_back]
    opened = [row for row in rows if not row.held_back]
    asked, started, torch = env["request"], env["started"][:10], env["versions"]["torch"]
    command = "shardproof faults --field" + " --quick" * asked["quick"] + f" --{asked['only']}" * bool(asked["only"])
    circumstances = f"Version {_version()}, {started}, torch {torch}, two busy cores."
    parts = {"of this page": opened, "kept back while rules of diagnosis were written": held_back}
    told_of = {name: figures(part) for name, part in parts.items() if part}
    lines = [MEASURED, circumstances, "", f"    {command}", "", _row(("", *told_of)), "|---" * (1 + len(told_of)) + "|"]
    lines += [_row((what, *(_share(getattr(one, name)) for one in told_of.values()))) for what, name in _SHARES.items()]
    return "\n".join([*lines, "", "Not so:", "", *_wrong(opened), ""])


_SHARES = {
    "bugs planted that a check noticed": "killed",
    "first place right": "region_right",
    "first cause right, of those that have a right one": "cause_right",
    "first cause misleading": "cause_misleading",
    "the words that the failure needs named (`when:`)": "when_told",
    "quiet without the bug, in the same case": "twin_quiet",
}


def _share(share: tuple[int, int]) -> str:
    part, whole = share
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "-"


def _wrong(rows: Sequence[Kill]) -> list[str]:
    found = []
    for row in rows:
        faults = [
            "noticed by no check" if row.survived else "",
            "first place" if row.region_right == NO else "",
            "misleading cause" if row.cause_told == MISLEADING else "",
            "no cause" if row.cause_right == NO and row.cause_told != MISLEADING else "",
            "not quiet without it" if row.twin == NO else "",
        ]
        if any(faults):
            found.append(f"- `{row.name}` (mode={row.mode}): {', '.join(word for word in faults if word)}")
    return found or ["nothing."]


def main(arguments: Sequence[str]) -> int:
    """Write the page, or print its rows as CSV.

    Its figures are those of a run where its folder is given, else those that it has.
    """
    if [*arguments] == ["--csv"]:
        print(as_csv(), end="")
        return 0
    before = "".join(PAGE.read_text("utf-8").partition(MEASURED)[1:])
    PAGE.write_text(page() + (measure_folder(Path(arguments[0])) if arguments else before), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
