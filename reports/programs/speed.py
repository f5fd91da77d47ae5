"""How fast a recorded program was: tokens, FLOPs and bandwidth, and its step beside the case that describes it.

Execution traces add FLOPs of a step, results that nothing reads, and repeated gathers. Beside a case: calls and bytes
of rank 0 in the median recorded step and in the closed form of the case, and the time that is predicted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pandas as pd

from harness.cases import read_case
from harness.engines.shapes.dry import DryEngine
from harness.errors import MachineError, ShardproofError
from harness.predicting.clusters import read
from harness.predicting.costs import route
from harness.predicting.forecast import forecast
from harness.programs.execution_trace import TracedOperator, Used, flops, nodes_of, used
from harness.programs.kineto import EXECUTION_SUFFIX, OPERATOR_STEPS
from harness.protocols import CaseLike
from harness.subject import named, named_axes, stated
from harness.terms import closed_forms
from reports.programs.figures import grouped, median, steps
from reports.stored.files import part_folders
from reports.stored.frames import Run

_Place = tuple[str, str, str, str]
"""Op, axis, region and caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """FLOPs of a step by rank, and sentences; both empty without execution traces."""

    flops: dict[int, float]
    findings: tuple[str, ...]


def watched_steps(run: Run) -> list[int]:
    """The steps that the execution traces cover, which took longer for it; [] without traces."""
    if not list((run.path / "traces").glob(f"rank*{EXECUTION_SUFFIX}")):
        return []
    return sorted(set(steps(run)["step"]))[:OPERATOR_STEPS]


def operators(run: Run) -> Operators:
    """Read the traces of all ranks: a second for some ten thousand operators."""
    within = watched_steps(run)
    work: dict[int, float] = {}
    unread: list[Counter[_Place]] = []
    repeated: list[Counter[_Place]] = []
    problems: list[str] = []
    for rank in part_folders(run.path) if within else ():
        path = run.path / "traces" / f"rank{rank}{EXECUTION_SUFFIX}"
        try:
            nodes = nodes_of(path)
        except MachineError as problem:
            problems.append(str(problem))
            continue
        work[rank] = flops(nodes) / len(within)
        places = _placed(run, rank, within, nodes)
        unread.append(Counter(place for place, one in places if one.unread))
        repeated.append(Counter(place for place, one in places if one.repeated))
    which = f"steps {within[0]} to {within[-1]}" if within else ""
    told = [f"{_call(place, n)} whose result no operator reads on any rank ({which})" for place, n in _common(unread)]
    told += [
        f"{_call(place, n)} of what was gathered before and is unchanged, on every rank ({which})"
        for place, n in _common(repeated)
    ]
    return Operators(flops=work, findings=(*told, *problems))


def _placed(run: Run, rank: int, within: list[int], nodes: list[TracedOperator]) -> list[tuple[_Place, Used]]:
    """The calls of a trace with the places that the ledger gives them; without one where the two do not reconcile."""
    frame = steps(run)
    began = frame[frame["rank"] == rank].set_index("step")["start_us"]
    # Calls between two steps may belong to either; the trace begins and ends with the first forward of a step.
    begin, middle, end = (began.get(within[0] + more, float("inf")) for more in range(3))
    rows = run.ledger[(run.ledger["rank"] == rank) & run.ledger["start_us"].between(begin, end, inclusive="left")]
    rows = rows.sort_values("call_index")
    calls = used(nodes, settled=int((rows["start_us"] < middle).sum()))
    texts: list[Any] = rows[["op", "axis", "region", "caller"]].astype("str").values.tolist()
    if [one.op for one in calls] != [text[0] for text in texts]:
        return [((one.op, "", "", ""), one) for one in calls]
    return [((op, axis, region, caller), one) for (op, axis, region, caller), one in zip(texts, calls, strict=True)]


def _common(found: list[Counter[_Place]]) -> Iterator[tuple[_Place, int]]:
    """What is so on every rank, where it is least often so, most often first."""
    if found:
        yield from reduce(lambda one, other: one & other, found).most_common(5)


def _call(place: _Place, number: int) -> str:
    op, axis, region, caller = place
    over = f" over {axis}" if axis else ""
    return f"{number} {op}{over}{f' in {region}' if region else ''} at {caller or '?'}"


def step_s(run: Run) -> float:
    """Seconds of a step: the median over steps of the slowest rank; steps under an execution trace only if all are."""
    frame = steps(run)
    free = frame[~frame["step"].isin(watched_steps(run))]
    frame = free if free["step_us"].notna().any() else frame
    return float(frame.groupby("step")["step_us"].max().median()) / 1e6


def speed(run: Run, work: Operators) -> Iterator[tuple[str, str]]:
    """What and how much: tokens a second where the recording was given them, FLOPs where a trace counted them."""
    took = step_s(run)
    if math.isnan(took) or not took:
        return
    if tokens := run.env.get("stated", {}).get("tokens"):
        yield "tokens a second", f"{tokens / took:,.0f}"
        yield "tokens a second and rank", f"{tokens / took / max(1, run.ledger['rank'].nunique()):,.0f}"
    if work.flops:
        whole = sum(work.flops.values())
        yield "TFLOP a step, all ranks", f"{whole / 1e12:.4g}"
        yield "TFLOP/s of a rank", f"{whole / len(work.flops) / took / 1e12:.4g}"


def bandwidth(run: Run) -> pd.DataFrame:
    """op, axis, group_size, calls, wire_bytes, gb_s (wire bytes over the time inside the calls, waiting for late ranks
    included), link, share (of what one rank can send through it, NaN without a cluster); calls of known duration.
    """
    events = grouped(run)
    events = events[(events["duration_us"] > 0) & (events["wire_bytes"] > 0)]
    keys = ["op", "axis", "group_size"]
    sums = events.groupby(keys, observed=True).agg(
        calls=("op", "size"), wire_bytes=("wire_bytes", "sum"), us=("duration_us", "sum"), ranks=("ranks", "first")
    )
    frame = sums.assign(gb_s=sums["wire_bytes"] / sums["us"] / 1e3).reset_index()
    name = run.env.get("stated", {}).get("cluster")
    links = [_link(ranks, name) for ranks in frame["ranks"]]
    frame["link"] = [link for link, _ in links]
    frame["share"] = [gb_s / rate if rate else math.nan for gb_s, (_, rate) in zip(frame["gb_s"], links, strict=True)]
    return frame.drop(columns=["us", "ranks"])


def _link(ranks: str, cluster: Any) -> tuple[str, float]:
    """The outermost link between these ranks, and what one of them sends through it: 1e9 bytes a second."""
    if not cluster or not ranks:
        return "", 0.0
    way = route([int(rank) for rank in ranks.split()], read(str(cluster)))
    return way.link, 1 / way.byte_s / 1e9 if way.byte_s else 0.0


_SUBJECT = "parallel.subject:subject"
_Kind = tuple[str, int]
"""Op and ranks of the group: a program's axes may have other names than the case's."""


def beside(run: Run) -> tuple[pd.DataFrame, str]:
    """op, group_size, calls, predicted_calls, payload_bytes, predicted_bytes; and a sentence on time, or why not.

    Calls and bytes are those of rank 0 in the median recorded step, and in the closed form of the case.
    """
    text = str(run.env.get("stated", {}).get("case", ""))
    if not text:
        return pd.DataFrame(), ""
    try:
        case = read_case(text)
        predicted = _stated_calls(case)
        time = _time_beside(run, case)
    except ShardproofError as problem:
        return pd.DataFrame(), f"case {text!r} is not compared: {problem}"
    recorded = _recorded_calls(run)
    nothing = (0.0, 0.0)
    rows = [
        (*kind, *(recorded.get(kind, nothing)), *(predicted.get(kind, nothing)))
        for kind in sorted({*recorded, *predicted})
        if recorded.get(kind, nothing)[0] or kind in predicted
    ]
    names = ["op", "group_size", "calls", "payload_bytes", "predicted_calls", "predicted_bytes"]
    return pd.DataFrame(rows, columns=names), time


def _stated_calls(case: CaseLike) -> dict[_Kind, tuple[float, float]]:
    subject, short = named(_SUBJECT).call, case.but(steps=1)
    form = closed_forms(stated(short, subject) or (), (0,), named_axes(short, subject))[0]
    calls: Counter[_Kind] = Counter()
    sent: Counter[_Kind] = Counter()
    for line, number in form.complete.items():
        if line.group_size == 1:
            continue
        calls[line.op, line.group_size] += number
        sent[line.op, line.group_size] += number * line.payload_bytes
    return {kind: (float(calls[kind]), float(sent[kind])) for kind in calls}


def _recorded_calls(run: Run) -> dict[_Kind, tuple[float, float]]:
    events = run.ledger[(run.ledger["rank"] == 0) & (run.ledger["group_size"] > 1)].astype({"op": "str"})
    number = max(1, events["step"].nunique())
    found = {}
    for kind, rows in events.groupby(["op", "group_size"], observed=True):
        op, size = (str(part) for part in kind) if isinstance(kind, tuple) else ("", "0")
        each = rows.groupby("step")["payload_bytes"]
        found[op, int(size)] = (median(each.size(), number), median(each.sum(), number))
    return found


def _time_beside(run: Run, case: CaseLike) -> str:
    name = run.env.get("stated", {}).get("cluster")
    if not name:
        return "its time is predicted when the recording names its --cluster"
    with DryEngine() as engine:
        told = forecast(case, named(_SUBJECT).call, read(str(name)), engine)
    took = step_s(run)
    return f"a step took {took:.4g} s, predicted {told.step_s:.4g} s on {name}: {took / told.step_s:.3g} times as long"
