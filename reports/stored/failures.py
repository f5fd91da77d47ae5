"""Failures grouped by their first place, one block of six lines each, and how each spread from there.

The place is that of the six lines (`harness.diagnosing.failure_lines.site`), layers counted as one. So one bug of all
checks, cases and modes is one group. From `errors.csv` a group has a map of layers by phases, error over allowed. A
cell is the worst tensor that a layer computes in a phase. The first step has its own columns, all later steps together
theirs: they follow from it. The first place has a mark of its own, whatever its numbers are.
"""

import linecache
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from shardproof.harness.ledger import PHASES
from shardproof.reports.stored.files import csv_table
from shardproof.reports.stored.frames import Run

_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""From the dtype in which rounding hides least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """Failed checks that share their first place: the case and message of the first.

    `others` are the checks that fail beside it, with the number of their cases, and `cases` how many cases these are.
    """

    case: str
    check: str
    message: str
    others: Mapping[str, int]
    cases: int

    @property
    def follows(self) -> str:
        """Words on further failures: "and update (12 cases) fails from the same first place on in 12 cases", or ""."""
        if not self.others:
            return ""
        checks = [f"{check} ({count} cases)" if count > 1 else check for check, count in self.others.items()]
        verb = "fail" if len(checks) > 1 else "fails"
        where = f" in {self.cases} case{'s' if self.cases > 1 else ''}"
        return f"and {', '.join(checks)} {verb} from the same first place on{where}"


def bugs(verdicts: pd.DataFrame) -> list[Bug]:
    """The failed verdicts of a run (columns case, check, verdict, message) by first place, in their own order."""
    found = []
    for first, *rest in _by_first_place(verdicts[verdicts["verdict"] == "fail"]):
        cases: dict[str, set[str]] = {}
        for row in rest:
            cases.setdefault(row["check"], set()).add(row["case"])
        place = {name: first[name] for name in ("case", "check", "message")}
        others = {check: len(own) for check, own in cases.items()}
        found.append(Bug(**place, others=others, cases=len(set().union(*cases.values()))))
    return found


def _by_first_place(failed: pd.DataFrame) -> list[list[dict[str, str]]]:
    """Failed verdicts as rows, those with one first place together, in the order in which their cases are stored.

    Of one case the largest error over its limit comes first, among failures of one first place and among such places.
    Failures of one case that have other causes are other faults, at the same place too.
    """
    if failed.empty:
        return []
    from shardproof.harness.diagnosing.failure_lines import line_of, site  # noqa: PLC0415

    rows = [{str(key): str(value) for key, value in row.items()} for row in failed.to_dict("records")]
    shares = _shares(rows)
    turn = {case: place for place, case in enumerate(dict.fromkeys(row["case"] for row in rows))}
    order = sorted(range(len(rows)), key=lambda place: (turn[rows[place]["case"]], -shares[place]))
    found: dict[tuple[str, int], list[dict[str, str]]] = {}
    causes: dict[tuple[str, str], list[str]] = {}
    for row in (rows[place] for place in order):
        first, words = site(row["message"]), line_of(row["message"], "causes")
        known = causes.setdefault((row["case"], first), [])
        known += [words] if words not in known else []
        found.setdefault((first, known.index(words)), []).append(row)
    return list(found.values())


def _shares(rows: list[dict[str, str]]) -> list[float]:
    """Errors of failures in units of their limits.

    A limit of 0 counts as the smallest other one of its case. Layouts, names and data come before any number,
    and are infinite. Counts of calls come last.
    """
    limits: dict[str, float] = {}
    for row in rows:
        if row["check"] not in _OF_CALLS and (allowed := _number(row, "worst_allowed")):
            limits[row["case"]] = min(allowed, limits.get(row["case"], math.inf))
    shares = []
    for row in rows:
        error, allowed = _number(row, "worst_error"), _number(row, "worst_allowed") or limits.get(row["case"], 0.0)
        share = math.inf if error is None else _share(error, allowed)
        shares.append(-1.0 if row["check"] in _OF_CALLS else share)
    return shares


def _number(row: Mapping[str, str], column: str) -> float | None:
    """A column of a verdict, None where nothing was measured."""
    number = float(row.get(column) or "nan")
    return None if math.isnan(number) else number


def simplest_first(run: Run) -> pd.DataFrame:
    """The verdicts of a run, those of the simplest case first: float64 before float32, few ranks before many."""
    ranked = sorted(run.cases.to_dict("records"), key=lambda row: simplicity({str(key): row[key] for key in row}))
    place = {str(row["case"]): number for number, row in enumerate(ranked)}
    return run.verdicts.sort_values("case", key=lambda cases: cases.map(place), kind="stable", ignore_index=True)


def simplicity(case: Mapping[str, Any]) -> tuple[float, ...]:
    """Sort key of a case of `cases.jsonl`, simpler first: dtype, ranks, steps, micro-batches, number of words."""
    dtype = str(case.get("dtype", _DTYPES[0]))
    sizes = [float(case.get(word) or 0) for word in ("world_size", "steps", "micro")]
    known = [0.0 if math.isnan(size) else size for size in sizes]
    place = _DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)
    return (place, *known, len(str(case.get("case", "")).split()))


_OF_CALLS = frozenset({"ledger", "groups", "waits", "overlap", "parallelism"})
"""Checks that look at no number of a tensor."""
_TYPES = dict.fromkeys(("case", "name", "phase", "region", "first"), "str") | {
    "step": "int64",
    "error": "float64",
    "allowed": "float64",
}
_WHOLE = "whole model"
"""The row of what no module computes alone: logits, losses, norms of gradients, sums over ranks."""
_MOST_ROWS = 40
_WORST = 4
_Place = tuple[str, bool, str]
"""Layer, whether in a later step than the first, phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A layer in one phase: error over allowed as text, its class, the tensor, whether it is first.

    `heat` is "" where nothing was compared, "ok" within the limit, and from 1 to 4 beyond it, by powers of ten.
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
class Group:
    """Failures with one first place: where, in which cases, the first of them with its map, and what follows."""

    place: str
    cases: tuple[str, ...]
    case: str
    check: str
    message: str
    map: Map | None
    others: tuple[dict[str, str], ...]
    called_at: str = ""
    """Where the first call of the first place is issued, "" where it has none: `file:line: source`."""


def groups(failed: pd.DataFrame, folder: Path, ledger: pd.DataFrame) -> list[Group]:
    """Failed checks (rows of `Run.verdicts`) by their first place, in the order in which they are stored; `ledger` has
    the calls of the run.
    """
    by_place = _by_first_place(failed)
    drawn = maps(folder, {rows[0]["case"] for rows in by_place})
    return [
        Group(
            place=_place(rows[0]["message"]),
            cases=tuple(dict.fromkeys(row["case"] for row in rows)),
            case=rows[0]["case"],
            check=rows[0]["check"],
            message=rows[0]["message"],
            map=drawn.get(rows[0]["case"]),
            others=tuple(rows[1:]),
            called_at=_called_at(ledger[ledger["case"] == rows[0]["case"]], _place(rows[0]["message"])),
        )
        for rows in by_place
    ]


def _called_at(calls: pd.DataFrame, place: str) -> str:
    """File and line of the first of these calls in a place, "backward of layers.0.mlp.w1", with the source if here."""
    phase, _, module = place.partition(" of ")
    module = module.split(" ")[0]
    first = calls[(calls["phase"] == phase) & (calls["region"] == module)]["caller"].head(1)
    caller = str(first.iloc[0]) if len(first) else ""
    file, _, line = caller.rpartition(":")
    source = linecache.getline(file, int(line)).strip() if line.isdigit() else ""
    return f"{caller}: {source}" if source else caller


def _place(message: str) -> str:
    """The place in the line `first:` of six lines; the first line of another message."""
    lines = message.splitlines() or [""]
    line = next((line for line in lines if line.startswith("first:")), lines[0])
    return line.removeprefix("first:").strip().partition(": ")[0]


def maps(folder: Path, cases: Collection[str]) -> dict[str, Map]:
    """Case -> its map, of these cases; {} for a run in which nothing failed, or which was stored without it."""
    path = folder / "errors.csv"
    if not path.is_file():
        return {}
    rows = csv_table(path, _TYPES, tuple(_TYPES), [])
    return {str(case): _map(own) for case, own in rows[rows["case"].isin(list(cases))].groupby("case", sort=False)}


def _map(errors: pd.DataFrame) -> Map:
    errors = errors.assign(layer=errors["region"].map(_layer))
    if errors["layer"].nunique() > _MOST_ROWS:
        errors = errors.assign(layer=errors["layer"].str.replace(r"\d+", "*", regex=True))
    worst: dict[_Place, tuple[float, str]] = {}
    first: _Place = ("", False, "")
    for row in errors.to_dict("records"):
        place = row["layer"], row["step"] > 0, row["phase"]
        if row["first"]:
            first = place
            continue
        share = _share(row["error"], row["allowed"])
        if place not in worst or share > worst[place][0]:
            worst[place] = share, row["name"]
    known = set(zip(errors["step"] > 0, errors["phase"], strict=True))
    columns = [(later, phase) for later in (False, True) for phase in PHASES if (later, phase) in known]
    return Map(
        first=tuple(phase for later, phase in columns if not later),
        later=tuple(phase for later, phase in columns if later),
        rows=tuple((layer, tuple(_cell(worst, (layer, *c), first) for c in columns)) for layer in _layers(errors)),
    )


def _layer(region: str) -> str:
    """ "layers.3" of "layers.3.mlp.w1", "embedding" of "embedding.tokens"."""
    numbered = re.match(r".*?\.\d+", region)
    return numbered[0] if numbered else region.partition(".")[0] or _WHOLE


def _layers(errors: pd.DataFrame) -> list[str]:
    """The rows in the order of forward: activations are stored in it, updates in the reverse one."""
    forward = list(errors.loc[errors["phase"] == "forward", "layer"])
    updates = list(errors.loc[errors["phase"] == "step", "layer"])[::-1]
    order = dict.fromkeys([*forward, *updates, *errors["layer"]])
    return [*(layer for layer in order if layer != _WHOLE), *([_WHOLE] if _WHOLE in order else [])]


def _share(error: float, allowed: float) -> float:
    """Error in units of what is allowed; infinite where that is nothing, or the error is infinite or no number.

    A control run of what overflows has an infinite limit, which says nothing of an infinite error.
    """
    if not math.isfinite(error) or (error and not allowed):
        return math.inf
    return error / allowed if allowed else 0.0


def _cell(worst: dict[_Place, tuple[float, str]], place: _Place, first: _Place) -> Cell:
    if place not in worst:
        return Cell(first=place == first)
    share, name = worst[place]
    return Cell(text=times(share), heat=heat(share), name=name, first=place == first)


def times(share: float) -> str:
    """Error over allowed as text: "ok", "3.2x", "1e9x"."""
    if share <= 1 or math.isinf(share):
        return "ok" if share <= 1 else "inf"
    return f"{share:.2g}x" if share < 1000 else f"1e{math.log10(share):.0f}x"


def heat(share: float) -> str:
    """The class of a cell: "ok" within the limit, from 1 to 4 beyond it, by factors of a thousand."""
    if share <= 1:
        return "ok"
    return str(_WORST if math.isinf(share) else min(_WORST, 1 + int(math.log10(share) // 3)))
