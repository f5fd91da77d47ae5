"""Failures grouped by their first place, with a block of six lines for each, and how each spread from there.

The place is that of the six lines (`harness.verdicts.verdict.Verdict.site`), with layers counted as one. So one bug in
all checks, cases and modes is one group. From `errors.csv` a group has a map of layers by phases, with error over
allowed. A cell is the worst tensor that a layer computes in a phase. The first step has its own columns; all later
steps share theirs, since they follow from it. The first place is marked, whatever its numbers are.
"""

import linecache
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from shardproof.harness.ledger import PHASES
from shardproof.harness.verdicts import words
from shardproof.harness.verdicts.facts import FailedCheck
from shardproof.harness.verdicts.verdict import FAIL, SKIP, UNKNOWN, Verdict
from shardproof.reports.stored.frames import Run, csv_table

_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""From the dtype in which rounding hides least."""
_NAMED_CASES = 3
"""The most cases that a title names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """Failed checks with the same first place; `verdict` is the first of them.

    `others` are further checks that fail with it, or the same check in further cases, with the number of these cases.
    `cases` is the number of all cases.
    """

    verdict: Verdict
    others: Mapping[str, int]
    cases: int

    @property
    def follows(self) -> str:
        """Words on further failures: "also failing at this place: update (1 case)", or ""."""
        return words.follows(self.verdict.check, self.others, self.cases)


def bugs_of_run(records: Iterable[Verdict]) -> list[Bug]:
    """The failed verdicts of a run by first place, in their own order."""
    found = []
    for first, *rest in _by_first_place([one for one in records if one.verdict == FAIL]):
        cases: dict[str, set[str]] = {}
        for one in rest:
            cases.setdefault(one.check, set()).add(one.case)
        others = {check: len(own) for check, own in cases.items()}
        found.append(Bug(verdict=first, others=others, cases=len(set().union(*cases.values()))))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheck:
    """A check that is unknown or skipped for one reason in these cases."""

    verdict: str
    check: str
    cases: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def title(self) -> str:
        """The verdict, its check if that is unknown, and the cases: "unknown (waits): tp=3; tp=2"."""
        check = f" ({self.check})" if self.verdict == UNKNOWN else ""  # a reason to skip names its check itself
        more = len(self.cases) - _NAMED_CASES
        return f"{self.verdict}{check}: {'; '.join(self.cases[:_NAMED_CASES])}{f' and {more} more' if more > 0 else ''}"


def open_checks(records: Iterable[Verdict]) -> list[OpenCheck]:
    """What is neither right nor wrong, unknown before skipped; an item for all cases in which one reason leaves it."""
    found: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for one in records:
        if one.verdict in (UNKNOWN, SKIP):
            check = one.check if one.verdict == UNKNOWN else ""
            found.setdefault((one.verdict, check, tuple(one.lines)), []).append(one.case)
    order = sorted(found, key=lambda key: key[0] != UNKNOWN)
    return [
        OpenCheck(verdict=verdict, check=check, cases=tuple(found[verdict, check, lines]), lines=lines)
        for verdict, check, lines in order
    ]


def _by_first_place(failed: Sequence[Verdict]) -> list[list[Verdict]]:
    """Failed verdicts, grouped by their first place, in the order in which their cases are stored.

    For each case the largest error over its limit comes first, in a group and among groups. Failures of one case at the
    same place are in different groups if their causes differ.
    """
    shares = _shares_of_limits(failed)
    turn = {case: place for place, case in enumerate(dict.fromkeys(one.case for one in failed))}
    order = sorted(range(len(failed)), key=lambda place: (turn[failed[place].case], -shares[place]))
    found: dict[tuple[str, int], list[Verdict]] = {}
    faults: dict[tuple[str, str], list[object]] = {}
    for one in (failed[place] for place in order):
        fault = one.failure.fault if one.failure else None
        known = faults.setdefault((one.case, one.site), [])
        known += [fault] if fault not in known else []
        found.setdefault((one.site, known.index(fault)), []).append(one)
    return list(found.values())


def _shares_of_limits(failed: Sequence[Verdict]) -> list[float]:
    """Errors of failures in units of their limits.

    A limit of 0 counts as the smallest other one of its case. Layouts, names and data come before any number, with an
    infinite error. Counts of calls come last.
    """
    limits: dict[str, float] = {}
    for one in failed:
        if one.check not in _OF_CALLS and one.worst and one.worst.allowed:
            limits[one.case] = min(one.worst.allowed, limits.get(one.case, math.inf))
    shares = []
    for one in failed:
        worst = one.worst
        share = _share_of_limit(worst.error, worst.allowed or limits.get(one.case, 0.0)) if worst else math.inf
        shares.append(-1.0 if one.check in _OF_CALLS else share)
    return shares


def simplest_first(run: Run) -> list[Verdict]:
    """The verdicts of a run, those of the simplest case first: float64 before float32, few ranks before many."""
    ranked = sorted(run.cases.to_dict("records"), key=lambda row: simplicity_key({str(key): row[key] for key in row}))
    place = {str(row["case"]): number for number, row in enumerate(ranked)}
    return sorted(run.records, key=lambda one: place.get(one.case, len(place)))


def simplicity_key(case: Mapping[str, Any]) -> tuple[float, ...]:
    """Sort key of a case of `cases.jsonl`, simpler first: dtype, ranks, steps, micro-batches, number of words."""
    dtype = str(case.get("dtype", _DTYPES[0]))
    sizes = [float(case.get(word) or 0) for word in ("world_size", "steps", "micro")]
    known = [0.0 if math.isnan(size) else size for size in sizes]
    place = _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)
    return (place, *known, len(str(case.get("case", "")).split()))


_OF_CALLS = frozenset({"ledger", "groups", "waits", "overlap", "parallelism"})
"""Checks that compare no numbers of tensors."""
_TYPES = dict.fromkeys(("case", "name", "phase", "region", "first"), "str") | {
    "step": "int64",
    "error": "float64",
    "allowed": "float64",
}
_WHOLE = "whole model"
"""The row of tensors that no single module computes: logits, losses, norms of gradients, sums over ranks."""
_MOST_ROWS = 40
_WORST = 4
_Place = tuple[str, bool, str]
"""Layer, whether in a later step than the first, phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A layer in one phase: error over allowed as text, its class, the tensor, whether it is first.

    `heat` is "" if nothing was compared, "ok" within the limit, and from 1 to 4 beyond it, by factors of a thousand.
    """

    text: str = ""
    heat: str = ""
    name: str = ""
    first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """The map of one case: phases of the first step and of later ones, and rows of a layer's name and its cells."""

    first: tuple[str, ...]
    later: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureGroup:
    """Failures with one first place: where, in which cases, the first of them with its map, and the others."""

    place: str
    cases: tuple[str, ...]
    verdict: Verdict
    map: Map | None
    others: tuple[Verdict, ...]
    called_at: str = ""
    """Where the first call of the first place is issued, `file:line: source`, or ""."""


def group_by_place(failed: Sequence[Verdict], folder: Path, ledger: pd.DataFrame) -> list[FailureGroup]:
    """Failed verdicts by their first place, in the order in which they are stored; `ledger`: the calls of the run."""
    by_place = _by_first_place(failed)
    drawn = maps_of_cases(folder, {own[0].case for own in by_place})
    return [
        FailureGroup(
            place=words.place(own[0].statement, own[0].failure),
            cases=tuple(dict.fromkeys(one.case for one in own)),
            verdict=own[0],
            map=drawn.get(own[0].case),
            others=tuple(own[1:]),
            called_at=_called_at(ledger[ledger["case"] == own[0].case], own[0].failure),
        )
        for own in by_place
    ]


def find_first_caller(calls: pd.DataFrame, failure: FailedCheck | None) -> str:
    """File and line of the first of these calls in the first place of a failure, "file:line", or ""."""
    phase, module = (failure.first.phase, failure.first.region) if failure else ("", "")
    first = calls[(calls["phase"] == phase) & (calls["region"] == module)]["caller"].head(1)
    return str(first.iloc[0]) if len(first) else ""


def _called_at(calls: pd.DataFrame, failure: FailedCheck | None) -> str:
    """The first caller, with the source if the file is here."""
    file, _, line = (caller := find_first_caller(calls, failure)).rpartition(":")
    source = linecache.getline(file, int(line)).strip() if line.isdecimal() else ""
    return f"{caller}: {source}" if source else caller


def maps_of_cases(folder: Path, cases: Collection[str]) -> dict[str, Map]:
    """Case -> its map, of these cases; {} for a run without failures, or stored without errors."""
    path = folder / "errors.csv"
    if not path.is_file():
        return {}
    rows = csv_table(path, _TYPES, tuple(_TYPES), [])
    return {
        str(case): _map_errors(own) for case, own in rows[rows["case"].isin(list(cases))].groupby("case", sort=False)
    }


def _map_errors(errors: pd.DataFrame) -> Map:
    errors = errors.assign(layer=errors["region"].map(_layer_of_region))
    if errors["layer"].nunique() > _MOST_ROWS:
        errors = errors.assign(layer=errors["layer"].str.replace(r"\d+", "*", regex=True))
    worst: dict[_Place, tuple[float, str]] = {}
    first: _Place = ("", False, "")
    for row in errors.to_dict("records"):
        place = row["layer"], row["step"] > 0, row["phase"]
        if row["first"]:
            first = place
            continue
        share = _share_of_limit(row["error"], row["allowed"])
        if place not in worst or share > worst[place][0]:
            worst[place] = share, row["name"]
    known = set(zip(errors["step"] > 0, errors["phase"], strict=True))
    columns = [(later, phase) for later in (False, True) for phase in PHASES if (later, phase) in known]
    return Map(
        first=tuple(phase for later, phase in columns if not later),
        later=tuple(phase for later, phase in columns if later),
        rows=tuple(
            (layer, tuple(_make_cell(worst, (layer, *c), first) for c in columns)) for layer in _layers_in_order(errors)
        ),
    )


def _layer_of_region(region: str) -> str:
    """ "layers.3" of "layers.3.mlp.w1", "embedding" of "embedding.tokens"."""
    numbered = re.match(r".*?\.\d+", region)
    return numbered[0] if numbered else region.partition(".")[0] or _WHOLE


def _layers_in_order(errors: pd.DataFrame) -> list[str]:
    """The rows in the order of forward: activations are stored in it, updates in the reverse one."""
    compared = errors[errors["name"].fillna("").ne("")]  # the row of the first place has no tensor and no order
    forward = list(compared.loc[compared["phase"] == "forward", "layer"])
    updates = list(errors.loc[errors["phase"] == "step", "layer"])[::-1]
    order = dict.fromkeys([*forward, *updates, *errors["layer"]])
    return [*(layer for layer in order if layer != _WHOLE), *([_WHOLE] if _WHOLE in order else [])]


def _share_of_limit(error: float, allowed: float) -> float:
    """The error in units of its limit; infinite if nothing is allowed, or the error is not finite.

    A control run that overflows has an infinite limit, which does not allow an infinite error.
    """
    if not math.isfinite(error) or (error and not allowed):
        return math.inf
    return error / allowed if allowed else 0.0


def _make_cell(worst: dict[_Place, tuple[float, str]], place: _Place, first: _Place) -> Cell:
    if place not in worst:
        return Cell(first=place == first)
    share, name = worst[place]
    return Cell(text=text_of_share(share), heat=heat_of_share(share), name=name, first=place == first)


def text_of_share(share: float) -> str:
    """Error over allowed as text: "ok", "3.2x", "1e9x"."""
    if share <= 1 or math.isinf(share):
        return "ok" if share <= 1 else "inf"
    return f"{share:.2g}x" if share < 1000 else f"1e{math.log10(share):.0f}x"


def heat_of_share(share: float) -> str:
    """The class of a cell: "ok" within the limit, from 1 to 4 beyond it, by factors of a thousand."""
    if share <= 1:
        return "ok"
    return str(_WORST if math.isinf(share) else min(_WORST, 1 + int(math.log10(share) // 3)))
