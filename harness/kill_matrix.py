"""The kill matrix: what planted bugs, faults and variants came to, one row each, and the figures over all rows.

A row is one of them in one mode. Times are seconds from planting to the verdict. `region_right` and `cause_right` are
"yes", "no" or "" where the row has no place or no cause that could be told. The columns are a contract: `COLUMNS`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["COLUMNS", "Figures", "Kill", "figures", "killed_alone"]

YES, NO = "yes", "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One row. `phase` and `region` are where it is planted; `killed_by` are the checks that failed."""

    name: str
    kind: str
    stands_for: str
    mode: str
    phase: str
    region: str
    killed_by: tuple[str, ...]
    equivalent: str
    seconds: float
    region_right: str
    cause_right: str

    @property
    def killed(self) -> bool:
        """Whether a check failed."""
        return bool(self.killed_by)

    @property
    def survived(self) -> bool:
        """Whether nobody noticed a fault that is one."""
        return not (self.killed_by or self.equivalent)

    def cells(self) -> tuple[str, ...]:
        """The row as `kill_matrix.csv` holds it."""
        words = {
            **{field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)},
            "killed_by": " ".join(self.killed_by),
            "killed": YES if self.killed else NO,
            "equivalent": YES if self.equivalent else NO,
            "seconds": f"{self.seconds:.3f}",
        }
        return tuple(words[column] for column in COLUMNS)


COLUMNS: tuple[str, ...] = (
    "name",
    "kind",
    "stands_for",
    "mode",
    "phase",
    "region",
    "killed_by",
    "killed",
    "equivalent",
    "seconds",
    "region_right",
    "cause_right",
)
"""Columns of `kill_matrix.csv`, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a matrix comes to; shares are (how many, of how many).

    `cause_right` leaves out rows for whose cause no diagnosis has a word; `cause_right_of_all` counts them as not told,
    faults alone left out, which are not diagnosed.
    """

    killed: tuple[int, int]
    equivalent: int
    median_s: float
    region_right: tuple[int, int]
    cause_right: tuple[int, int]
    cause_right_of_all: tuple[int, int]


def figures(rows: Sequence[Kill]) -> Figures:
    """Kill rate over rows that are not equivalent, the median time of kills, and how often the diagnosis was right."""
    real = [row for row in rows if not row.equivalent]
    times = [row.seconds for row in real if row.killed]

    def share(told: Callable[[Kill], str]) -> tuple[int, int]:
        known = [told(row) for row in real if told(row)]
        return known.count(YES), len(known)

    return Figures(
        killed=(sum(row.killed for row in real), len(real)),
        equivalent=len(rows) - len(real),
        median_s=statistics.median(times) if times else 0.0,
        region_right=share(lambda row: row.region_right),
        cause_right=share(lambda row: row.cause_right),
        cause_right_of_all=(
            sum(row.cause_right == YES for row in real),
            sum(row.kind != "fault" for row in real),
        ),
    )


def killed_alone(rows: Iterable[Kill], checks: Sequence[str]) -> dict[str, tuple[int, int, str]]:
    """Check -> rows it kills, rows that only it kills, and the name of the first of these ("" when there is none)."""
    found = {check: (0, 0, "") for check in checks}
    for row in rows:
        for check in row.killed_by:
            kills, alone, name = found.get(check, (0, 0, ""))
            only = len(row.killed_by) == 1
            found[check] = (kills + 1, alone + only, name or (row.name if only else ""))
    return found
