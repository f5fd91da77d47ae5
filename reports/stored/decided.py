"""How many tensors the verdicts of a run decide, by kind; which tensors stay undecided, by name.

A tensor is decided when it was found right or wrong: it was returned, it merged, the truth knows it, and its limits
admit no half of it. A kind is what a name begins with, in words: "gradients" of "grad/head.weight".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pandas as pd

from harness.checking.coverage import ON_PURPOSE
from harness.checking.numeric_checks import called
from reports.stored.frames import Run

_MOST = 12
"""Patterns of names that a note lists; all names stand in verdicts.jsonl."""
_NUMBER = re.compile(r"(?<=[./])\d+(?=[./]|$)")
_COUNTED = "decided", "tensors"


def by_kind(verdicts: pd.DataFrame) -> pd.DataFrame:
    """case, kind, decided, tensors: one row a case and kind; empty where no verdict counts any."""
    rows = [
        (str(row["case"]), called(kind), int(decided), int(tensors))
        for row in verdicts.to_dict("records")
        for kind, decided, tensors in _counts(str(row["decided"]))
    ]
    frame = pd.DataFrame(rows, columns=["case", "kind", *_COUNTED])
    return frame.groupby(["case", "kind"], sort=False, as_index=False)[list(_COUNTED)].sum()


def by_case(verdicts: pd.DataFrame) -> pd.DataFrame:
    """By case: decided, tensors."""
    return by_kind(verdicts).groupby("case", sort=False)[list(_COUNTED)].sum()


def decided_words(verdicts: pd.DataFrame) -> str:
    """All cases added up: "all 43 tensors decided", or the numbers of every kind that is not decided whole; "" where
    nothing was counted.
    """
    kinds = by_kind(verdicts).groupby("kind", sort=False)[list(_COUNTED)].sum()
    if kinds.empty:
        return ""
    decided, tensors = (int(kinds[name].sum()) for name in _COUNTED)
    if decided == tensors:
        return f"all {tensors:,} tensors decided"
    partly = kinds[kinds["decided"] < kinds["tensors"]]
    told = [f"{kind} {row['decided']:,} of {row['tensors']:,}" for kind, row in partly.iterrows()]
    others = ["all others"] if len(partly) < len(kinds) else []
    return f"{decided:,} of {tensors:,} tensors decided: {', '.join(told + others)}"


def undecided_notes(run: Run) -> list[str]:
    """A note for each kind of which returned tensors stay undecided: how many, in how many cases, and which."""
    missing = {case: _missing(own) for case, own in run.verdicts.groupby("case", sort=False)}
    names: dict[str, Counter[str]] = {}
    cases: dict[str, set[str]] = {}
    for row in run.verdicts.to_dict("records"):
        case = str(row["case"])
        kinds = {kind for kind, decided, tensors in _counts(str(row["decided"])) if decided < tensors}
        for name in str(row["unchecked"]).split("; "):
            prefix, _, rest = name.partition("/")
            if prefix in kinds and " " not in name and name not in missing[case]:
                names.setdefault(called(prefix), Counter())[_NUMBER.sub("*", f"{prefix}/{rest}")] += 1
                cases.setdefault(called(prefix), set()).add(case)
    counts = by_kind(run.verdicts)
    return [
        _note(kind, found, counts[counts["case"].isin(cases[kind]) & (counts["kind"] == kind)])
        for kind, found in names.items()
    ]


def _note(kind: str, names: Counter[str], counts: pd.DataFrame) -> str:
    listed = [name if count == 1 else f"{name} ({count})" for name, count in names.most_common(_MOST)]
    more = f" and {len(names) - _MOST} more patterns of names" if len(names) > _MOST else ""
    where = f"{len(counts)} case{'s' if len(counts) > 1 else ''}"
    told = f"{names.total():,} of {int(counts['tensors'].sum()):,} {kind} in {where}"
    return (
        f"undecided: {told}, since rounding explains any error of them or they do not merge: {', '.join(listed)}{more}"
    )


def _missing(verdicts: pd.DataFrame) -> set[str]:
    """The names that a case did not return, which have a note of their own."""
    found = verdicts.loc[verdicts["check"] == "coverage", "unchecked"]
    return {name.removesuffix(ON_PURPOSE) for text in found for name in str(text).split("; ")}


def _counts(text: str) -> Iterator[tuple[str, int, int]]:
    """Kind of name, how many are decided, of how many, from "grad 8/23; loss 2/2"."""
    for part in filter(None, text.split("; ")):
        kind, _, numbers = part.rpartition(" ")
        decided, _, tensors = numbers.partition("/")
        yield kind, int(decided), int(tensors)
