"""Failures grouped by the first place where they went wrong: one bug, one block of six lines.

The place is that of the six lines (`harness.diagnosing.six_lines.site`), layers counted as one, so that the same bug of
all checks, cases and modes is one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from harness.diagnosing.six_lines import site

__all__ = ["Bug", "bugs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """Failed checks that share their first place: the case and message of the first, and how many others there are."""

    case: str
    check: str
    message: str
    more_checks: int
    cases: int

    @property
    def follows(self) -> str:
        """How much fails beside the first one: "37 more checks in 12 cases ...", or "" when it is alone."""
        if not self.more_checks:
            return ""
        checks = f"{self.more_checks} more check{'s' if self.more_checks > 1 else ''}"
        verb = "fail" if self.more_checks > 1 else "fails"
        return f"and {checks} in {self.cases} case{'s' if self.cases > 1 else ''} {verb} from the same first place on"


def bugs(verdicts: pd.DataFrame) -> list[Bug]:
    """The failed verdicts of a run (columns case, check, verdict, message) by first place, in the order of the run."""
    failed = verdicts[verdicts["verdict"] == "fail"]
    found = []
    for _, group in failed.groupby(failed["message"].map(site), sort=False):
        first = group.iloc[0]
        cases = int(group["case"].iloc[1:].nunique())
        found.append(
            Bug(
                case=str(first["case"]),
                check=str(first["check"]),
                message=str(first["message"]),
                more_checks=len(group) - 1,
                cases=cases,
            )
        )
    return found
