"""Failures grouped by the first place where they went wrong: one bug, one block of six lines, of its simplest case.

The place is that of the six lines (`harness.diagnosing.six_lines.site`), layers counted as one, so that the same bug of
all checks, cases and modes is one group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.diagnosing.six_lines import site
from reports.stored.frames import Run

_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""From the dtype in which rounding hides least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """Failed checks that share their first place: the case and message of the first; `others` are the checks that fail
    beside it, with the number of their cases, and `cases` how many cases these are.
    """

    case: str
    check: str
    message: str
    others: Mapping[str, int]
    cases: int

    @property
    def follows(self) -> str:
        """What fails beside the first one: "and from the same first place on fail: update (12 cases) ...", or ""."""
        if not self.others:
            return ""
        told = [f"{check} ({count} cases)" if count > 1 else check for check, count in self.others.items()]
        verb = "fail" if len(told) > 1 else "fails"
        where = f" in {self.cases} case{'s' if self.cases > 1 else ''}"
        return f"and {', '.join(told)} {verb} from the same first place on{where}"


def bugs(verdicts: pd.DataFrame) -> list[Bug]:
    """The failed verdicts of a run (columns case, check, verdict, message) by first place, in their own order."""
    failed = verdicts[verdicts["verdict"] == "fail"]
    found = []
    for _, group in failed.groupby(failed["message"].map(site), sort=False):
        first, rest = group.iloc[0], group.iloc[1:]
        others = rest.groupby("check", sort=False)["case"].nunique()
        found.append(
            Bug(
                case=str(first["case"]),
                check=str(first["check"]),
                message=str(first["message"]),
                others={str(check): int(count) for check, count in others.items()},
                cases=int(rest["case"].nunique()),
            )
        )
    return found


def simplest_first(run: Run) -> pd.DataFrame:
    """The verdicts of a run, those of the simplest case first: float64 before float32, few ranks before many."""
    ranked = sorted(run.cases.to_dict("records"), key=lambda row: simplicity({str(key): row[key] for key in row}))
    place = {str(row["case"]): number for number, row in enumerate(ranked)}
    return run.verdicts.sort_values("case", key=lambda cases: cases.map(place), kind="stable", ignore_index=True)


def simplicity(case: Mapping[str, Any]) -> tuple[float, ...]:
    """What sorts a case of `cases.jsonl` before harder ones: dtype, ranks, steps, micro-batches, number of words."""
    dtype = str(case.get("dtype", _DTYPES[0]))
    sizes = [float(case.get(word) or 0) for word in ("world_size", "steps", "micro")]
    known = [0.0 if math.isnan(size) else size for size in sizes]
    place = _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)
    return (place, *known, len(str(case.get("case", "")).split()))
