"""What execution traces of a recorded program add: FLOPs of a step, results that nothing reads, repeated gathers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

from harness.errors import MachineError
from harness.programs.execution_trace import TracedOperator, Used, flops, nodes_of, used
from harness.programs.kineto import OPERATOR_STEPS
from harness.programs.stated import EXECUTION_SUFFIX
from reports.programs.figures import steps
from reports.stored import parts
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
    for rank in parts.ranks(run.path) if within else ():
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
