"""The kill matrix: what planted bugs, faults and variants came to, one row each, and the figures over all rows.

A row is one of them in one mode. Times are seconds from planting to the verdict. `region_right` and `cause_right` are
"yes", "no" or "" where the row has no place or no right cause. The columns are a contract: `COLUMNS`.

`held_back` mutants are never looked at by authors of rules of diagnosis; their rows are written without a name.
`cause_told` is one of `JUDGEMENTS`, or "" where nothing was diagnosed (faults, survivors):

    right           the first cause that is reported is one that is right for this bug, and so are all others
    right and more  the first one is right, another one beside it is not
    none            no cause is reported
    misleading      the first one is not right: right ones behind it do not count

A bug may be measured with its right twin (`shardproof faults --field`). `twin` is "yes" when the same case without the
bug is quiet, and `when` is the line of words that the failure needs.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardproof.harness.injecting.survey import Answer

YES, NO = "yes", "no"
FOUND = "only with"
"""Begins a line `when:` that names words."""
RIGHT, AND_MORE, NONE, MISLEADING = JUDGEMENTS = ("right", "right and more", "none", "misleading")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Answer):
    """A row. `phase` and `region` are where it is planted. A row with a `machine` has no verdict."""

    name: str
    kind: str
    stands_for: str
    mode: str
    phase: str
    region: str
    region_right: str
    cause_right: str
    held_back: bool = False
    cause_told: str = ""
    twin: str = ""
    when: str = ""

    def cells(self) -> tuple[str, ...]:
        """The row as `kill_matrix.csv` holds it; of a held-back mutant nothing says which one it is."""
        words = {
            **{field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)},
            "killed_by": " ".join(self.killed_by),
            "killed": YES if self.killed else NO,
            "equivalent": YES if self.equivalent else NO,
            "seconds": f"{self.seconds:.3f}",
            "held_back": YES if self.held_back else NO,
        }
        if self.held_back:
            words |= {"name": "held-back", "stands_for": "", "phase": "", "region": "", "when": ""}
        return tuple(words[column] for column in COLUMNS)

    @classmethod
    def of(cls, cells: Mapping[str, str]) -> "Kill":
        """The row of these cells by column; why an equivalent is one, or a row has no verdict, is not among them."""
        words = {name: cells[name] for name in ("name", "kind", "stands_for", "mode", "phase", "region")}
        words |= {name: cells[name] for name in ("region_right", "cause_right", "cause_told", "twin", "when")}
        return cls(
            **words,
            killed_by=tuple(cells["killed_by"].split()),
            equivalent=cells["equivalent"] if cells["equivalent"] == YES else "",
            seconds=float(cells["seconds"]),
            held_back=cells["held_back"] == YES,
        )


COLUMNS: tuple[str, ...] = (
    *("name", "kind", "stands_for", "mode", "phase", "region", "killed_by", "killed", "equivalent", "seconds"),
    *("region_right", "cause_right", "held_back", "cause_told", "twin", "when"),
)
"""Columns of `kill_matrix.csv`, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a matrix; shares are (how many, of how many).

    `cause_right` is of the rows for which a cause is right to report; the other shares of causes are of all diagnosed
    rows. `cause_more` are right ones with a wrong one beside them. `unfinished` rows, which the machine could not
    finish, count in no share. `when_told` are killed rows whose words were found, `twin_quiet` those that are quiet
    without the bug.
    """

    killed: tuple[int, int]
    equivalent: int
    unfinished: int
    median_s: float
    region_right: tuple[int, int]
    cause_right: tuple[int, int]
    cause_more: tuple[int, int]
    cause_none: tuple[int, int]
    cause_misleading: tuple[int, int]
    when_told: tuple[int, int]
    twin_quiet: tuple[int, int]


def figures(rows: Sequence[Kill]) -> Figures:
    """Kill rate over rows that are not equivalent, the median time of kills, and how often the diagnosis was right."""
    real = [row for row in rows if not (row.equivalent or row.machine)]
    times = [row.seconds for row in real if row.killed]
    causes = [row.cause_told for row in real if row.cause_told]

    def share(answer: Callable[[Kill], str]) -> tuple[int, int]:
        known = [answer(row) for row in real if answer(row)]
        return known.count(YES), len(known)

    return Figures(
        killed=(sum(row.killed for row in real), len(real)),
        equivalent=sum(bool(row.equivalent) for row in rows),
        unfinished=sum(bool(row.machine) for row in rows),
        median_s=statistics.median(times) if times else 0.0,
        region_right=share(lambda row: row.region_right),
        cause_right=share(lambda row: row.cause_right),
        cause_more=(causes.count(AND_MORE), len(causes)),
        cause_none=(causes.count(NONE), len(causes)),
        cause_misleading=(causes.count(MISLEADING), len(causes)),
        when_told=(sum(row.when.startswith(FOUND) for row in real), sum(bool(row.when) for row in real)),
        twin_quiet=share(lambda row: row.twin),
    )


def killed_alone(rows: Iterable[Kill], checks: Sequence[str]) -> dict[str, tuple[int, int, str]]:
    """Check -> rows it kills, rows that only it kills, and the name of the first of these ("" when there is none)."""
    figures_by_check = {check: (0, 0, "") for check in checks}
    for row in rows:
        for check in row.killed_by:
            kills, alone, name = figures_by_check.get(check, (0, 0, ""))
            only = len(row.killed_by) == 1
            named = name or (row.name if only and not row.held_back else "")
            figures_by_check[check] = (kills + 1, alone + only, named)
    return figures_by_check
