"""The catalogue of real bugs: planted bugs whose record names a public issue or pull request, as one page.

    python -m shardproof.suites.mutants.field [RUN]      writes docs/catalogue.md; RUN: a folder of
                                                         `shardproof faults --field`, without which the figures stay
    python -m shardproof.suites.mutants.field --csv      prints its rows for other tools, alternatives separated by "|"

Everything but what was measured follows from the records. Bugs that no case can show are not in it, nor are those that
are held back: `shardproof faults --field` measures these apart.
"""

import csv
import hashlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shardproof.bugs.references import defect
from shardproof.harness.running.injecting import MISLEADING, NO, Kill, figures
from shardproof.reference.case.variants import VARIANTS
from shardproof.suites.mutants.catalogue import MUTANTS, VARIANT_ROWS, Mutant

PAGE = Path(__file__).resolve().parents[2] / "docs" / "catalogue.md"
VERSION = "1"
"""The version of the page's rules: what counts as a match, and what its columns mean."""
MEASURED = "\n## Measured\n"
"""The heading above the figures of a run of `shardproof faults --field`; all before it follows from the records."""
_HEAD = """# A catalogue of real bugs

Version {version}: {bugs} planted bugs of {public} public issues and pull requests in {systems} repositories.

This page is generated. Each bug changes a few lines of ours so that they do what the issue describes; `bugs/open/` and
`bugs/variants.txt` have the lines. Cite it as "shardproof, catalogue of real bugs, version {version}"; the letters
are a digest of the rows.

    shardproof faults --field                        # plants each of them, and runs each case without its bug
    shardproof faults --field --emit-repro all DIR   # writes those that a returned tensor shows as scripts
    python -m shardproof.suites.mutants.field        # writes this page; with --csv prints its rows, for other tools

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
    """The references of these rows, each once."""
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
    """What a run of `shardproof faults --field` found: its command, its figures, and every row that is not right."""
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

    With the folder of a run its figures are written, otherwise the page keeps its own.
    """
    if [*arguments] == ["--csv"]:
        print(as_csv(), end="")
        return 0
    before = "".join(PAGE.read_text("utf-8").partition(MEASURED)[1:])
    PAGE.write_text(page() + (measure_folder(Path(arguments[0])) if arguments else before), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
