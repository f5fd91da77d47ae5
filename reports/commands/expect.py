"""`shardproof expect`: what a recorded run did, as the terms of a closed form that can be pasted into a subject.

Calls that differ between the places of one mesh axis and nowhere else are terms at each of these places. Calls that
differ otherwise are printed without the numbers that differ, and a comment has what each rank did. All counts are those
of one rank over the whole run; payloads are bytes.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pandas as pd

from shardproof.harness.dense_model import read_case
from shardproof.harness.errors import RequestError, ranks_text
from shardproof.harness.protocols import Axes, case_text
from shardproof.harness.terms import FIELDS, Term
from shardproof.reports.printing.text import show_message, show_note
from shardproof.reports.programs.figures import total
from shardproof.reports.stored.frames import Run, load

_SHORT = ("op", "axis")
"""The fields of a short term."""
_SIZED = tuple(name for name in FIELDS if name != "payload_bytes")
Amounts = tuple[tuple[int, int | None], ...]
"""Calls and bytes by rank; None where a trace does not know the bytes."""


class Line(NamedTuple):
    """A term, and what each rank did if ranks differ, else ""."""

    term: Term
    differ: str = ""


def main(arguments: argparse.Namespace) -> int:
    """Print the terms of one case of a run. Exit status 0; raises RequestError when the run has no such case."""
    run = load(arguments.run)
    case = _choose_case(run, " ".join(arguments.case))
    verdicts = run.verdicts[(run.verdicts["case"] == case) & ~run.verdicts["verdict"].isin(("pass", "skip"))]
    if len(verdicts):
        checks = ", ".join(verdicts["check"])
        show_note(f"{case} did not pass ({checks}): what it did may be wrong", sys.stderr)
    show_message(
        write_terms(case, run.path.resolve().name, lines_of_terms(run, case, short=arguments.short)), sys.stdout
    )
    return 0


def _choose_case(run: Run, text: str) -> str:
    """The case of this text among those of the run, in any order of words; without a text, the only one."""
    cases = [str(case) for case in run.cases["case"]]
    if not text:
        if len(cases) == 1:
            return cases[0]
        raise RequestError(f"run {run.path}: has {len(cases)} cases, so name one; legal: {_quote_cases(cases)}")
    own = "words" in run.cases  # only the subject itself can read its own words
    for case in cases:
        if {*case.split()} == {*text.split()} or (not own and _canonical_text(case) == _canonical_text(text)):
            return case
    raise RequestError(f"case {text!r}: is not in run {run.path}; legal: {_quote_cases(cases)}")


def _canonical_text(text: str) -> str:
    """The canonical text of a case of our decoder; any other text as it is."""
    try:
        return case_text(read_case(text))
    except RequestError:
        return text


def _quote_cases(cases: Sequence[str]) -> str:
    more = f" and {len(cases) - 5} more" if len(cases) > 5 else ""
    return ", ".join(f'"{case}"' for case in cases[:5]) + more


def lines_of_terms(run: Run, case: str, *, short: bool = False) -> list[Line]:
    """The terms of what this case did, in the order of their first calls, from the lowest rank on.

    A term stands for all equal calls; with `short`, for all calls of an op over an axis.
    """
    events = run.events[run.events["case"] == case].sort_values(["rank", "call_index"], kind="stable")
    ranks, axes = _ranks_that_ran(run, case, events), dict[str, Any]()
    with suppress(RequestError):  # the mesh of other subjects' cases is not known
        axes |= read_case(case).axes
    unknown = _unknown_columns(run)
    names = [name for name in (_SHORT if short else _SIZED) if name not in unknown]
    short = short or "payload_bytes" in unknown
    lines_of_terms = []
    for values, alike in events.groupby(names, sort=False, observed=True, dropna=False):
        fields: dict[str, Any] = dict(zip(names, (_plain_value(value) for value in values), strict=True))
        sizes = [] if short else list(alike.groupby("payload_bytes", sort=False))
        if not short and all(len(set(_amounts_by_rank(equal, ranks))) == 1 for _, equal in sizes):
            lines_of_terms += [
                Line(Term(**fields, payload_bytes=_plain_value(size), calls=_amounts_by_rank(equal, ranks)[0][0]))
                for size, equal in sizes
            ]
        else:
            summed = [_sum_term(fields, _amounts_by_rank(alike, ranks), ranks)]
            lines_of_terms += (not short and _by_place(fields, sizes, ranks, axes)) or summed
    return lines_of_terms


def _unknown_columns(run: Run) -> set[str]:
    """Of traces: the columns that some calls lack, and `region`, since modules there are no paths in a model."""
    return {"region", *run.env.get("unknown", {}).get("columns", ())} if "source" in run.env else set()


def _by_place(
    fields: dict[str, Any], sizes: Sequence[tuple[Any, pd.DataFrame]], ranks: Sequence[int], axes: Axes
) -> list[Line]:
    """Terms by place on the first axis on which a rank's place decides its calls; empty if there is no such axis."""
    for axis, lists in axes.items():
        places = [next(one.index(rank) for one in lists if rank in one) for rank in ranks]
        found = []
        for size, equal in sizes:
            calls: dict[int, set[int]] = {}
            for place, (count, _) in zip(places, _amounts_by_rank(equal, ranks), strict=True):
                calls.setdefault(place, set()).add(count)
            if any(len(counts) > 1 for counts in calls.values()):
                break
            alike = len(set.union(*calls.values())) == 1
            found += [
                Term(**fields, payload_bytes=_plain_value(size), calls=count, at={} if alike else {axis: place})
                for place, (count,) in ([*calls.items()][:1] if alike else sorted(calls.items()))
                if count
            ]
        else:
            return [Line(term) for term in found]
    return []


def _ranks_that_ran(run: Run, case: str, events: pd.DataFrame) -> list[int]:
    """The ranks of a case. Of a dry run or of traces, which may have some ranks only, those with events."""
    if run.env.get("request", {}).get("engine") == "dry" or "source" in run.env:
        return sorted(set(events["rank"]))
    return list(range(int(run.cases.loc[run.cases["case"] == case, "world_size"].iloc[0])))


def _plain_value(value: object) -> Any:
    """A value of a frame as Python's own."""
    return value if isinstance(value, str) else int(str(value))


def _amounts_by_rank(events: pd.DataFrame, ranks: Iterable[int]) -> Amounts:
    calls = events.groupby("rank")["payload_bytes"].agg(["size", total])
    by_rank = {
        int(str(rank)): (int(size), None if total is pd.NA else int(total)) for rank, size, total in calls.itertuples()
    }
    return tuple(by_rank.get(rank, (0, 0)) for rank in ranks)


def _sum_term(fields: dict[str, Any], amounts: Amounts, ranks: Sequence[int]) -> Line:
    """A term of all these calls, with the numbers that all ranks have in common."""
    calls, sizes = {amount[0] for amount in amounts}, {amount[1] for amount in amounts}
    term = Term(
        **fields, calls=calls.pop() if len(calls) == 1 else None, total_bytes=sizes.pop() if len(sizes) == 1 else None
    )
    alike: dict[tuple[int, int | None], list[int]] = {}
    for rank, amount in zip(ranks, amounts, strict=True):
        alike.setdefault(amount, []).append(rank)
    amounts_of_ranks = [
        f"rank {ranks_text(who)}: {calls} calls, {'unknown bytes' if size is None else f'{size} B'}"
        for (calls, size), who in alike.items()
    ]
    return Line(term, "; ".join(amounts_of_ranks) if len(alike) > 1 else "")


def write_terms(case: str, run: str, found: Sequence[Line]) -> str:
    """The terms as Python that can be pasted: a function that states them for this case."""
    plain = case.startswith("mode=") and " " not in case  # the case with default words has the empty text
    other = f'not in ("", {json.dumps(case)})' if plain else f"!= {json.dumps(case)}"
    lines = []
    for term, differ in found:
        lines += [f"        # ranks differ, and a term is for all of them: {differ}"] if differ else []
        lines.append(f"        {term!r},")
    return _WRITTEN.format(run=run, other=other, lines="\n".join(lines))


_WRITTEN = '''from shardproof import Term


def expected(case):
    """What run {run} did: recorded, not derived. Compare each number with what you meant."""
    if str(case) {other}:
        return None  # numbers that are computed from the case hold for other cases too
    return [
{lines}
    ]'''
