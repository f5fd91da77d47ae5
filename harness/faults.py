"""Faults: systematic disturbances of the collectives of any subject, made from its ledger alone, without its source.

A target is one distinct call of the program, on all ranks and in all micro-batches and steps: op, reduce op, axis,
group size, dtype, phase, region, and its number among equals within a micro-batch. Runs repeat exactly, so a target's
calls are known by rank and call index from one clean ledger. A fault is a target and what happens to its data, below
the recorder. The ledger stays clean, and only what is computed can show the fault.

    drop    a rank has what it would have alone: its own term, its own part in every place, its buffer as it was
    double  the call's result goes through the call again; where its shape forbids that, a reduced result counts twice
    op      another reduction: `change` says which
    group   other ranks: `change` names another axis, "world", "shifted" (the groups begin one rank later) or
            "reversed" (the same ranks in reverse order)
    stale   what the target's previous call left on this rank; a target called once gives zeros
    delay   the right value, but only at the rank's next call after the wait; until then as with `drop`
    poison  NaN; the largest integer; the opposite bool

The engine's side is `harness.engines.faults.disturbance`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from shardproof.harness.ledger import Event
from shardproof.harness.protocols import CaseLike

KINDS = ("drop", "double", "op", "group", "stale", "delay", "poison")
Partition = tuple[tuple[int, ...], ...]
"""The groups of one axis: lists of global ranks."""
RankCallIndex = tuple[int, int]
"""(rank, call index): one row of the ledger."""

_OPS = {"sum": ("avg", "max"), "avg": ("sum", "max"), "max": ("sum", "min"), "min": ("sum", "max")}
"""Reduce op -> ops that may be used by mistake."""
_REGROUPED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_SILENT = ("barrier", "send")
"""A barrier carries no data, and what is sent is disturbed where it is received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A distinct call of a program; `calls` are its (rank, call index), rank by rank in the order of issue."""

    op: str
    reduce_op: str
    axis: str
    group_size: int
    dtype: str
    phase: str
    region: str
    number: int
    calls: tuple[RankCallIndex, ...]

    def __str__(self) -> str:
        reduction = f"{self.reduce_op} " if self.reduce_op else ""
        where = f" {self.region}" if self.region else ""
        return f"{reduction}{self.op} {self.axis} {self.phase}{where} #{self.number}"

    @property
    def once(self) -> bool:
        """Whether no rank issues it twice."""
        return len({rank for rank, _ in self.calls}) == len(self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A disturbance of a target's data. `groups` are those of a group fault.

    `rank` is the one rank whose result is spoiled. With -1 all are, as by a bug in the program.
    """

    kind: str
    target: Target
    change: str = ""
    rank: int = -1
    groups: Partition = ()

    def __str__(self) -> str:
        words = [self.kind, f"to {self.change}:" if self.change else "", str(self.target)]
        words += [f"on rank {self.rank}"] if self.rank >= 0 else []
        return " ".join(word for word in words if word)

    @property
    def places(self) -> frozenset[RankCallIndex]:
        """The (rank, call index) of the calls that it hits."""
        return frozenset(call for call in self.target.calls if self.rank in {-1, call[0]})


def targets_of(events: Iterable[Event]) -> tuple[Target, ...]:
    """The distinct calls of a ledger, in the order of their first events."""
    seen: Counter[tuple[object, ...]] = Counter()
    first: dict[tuple[object, ...], Event] = {}
    calls: dict[tuple[object, ...], list[RankCallIndex]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.rank, e.call_index)):
        place = (event.op, event.reduce_op, event.axis, event.phase, event.region)
        within = (*place, event.rank, event.step, event.microbatch)
        key = (*place, event.group_size, event.dtype, seen[within])
        seen[within] += 1
        first.setdefault(key, event)
        calls[key].append((event.rank, event.call_index))
    shared = [field.name for field in fields(Target) if field.name not in ("number", "calls")]
    return tuple(
        Target(**{name: getattr(event, name) for name in shared}, number=int(str(key[-1])), calls=tuple(calls[key]))
        for key, event in first.items()
    )


def faults_of(
    events: Iterable[Event], axes: Mapping[str, Partition], *, kinds: Sequence[str] = KINDS, rank: int = -1
) -> tuple[Fault, ...]:
    """Every legal fault of these kinds for every target of a clean ledger; `axes` are the case's.

    With `rank`, those that spoil the result of this rank only: drop, op, stale, delay, poison. Equivalent faults are
    among them: harness.running.injecting finds them, with the reason.
    """
    return tuple(
        replace(fault, rank=rank)
        for target in targets_of(events)
        for kind in kinds
        for fault in _of_kind(kind, target, axes)
        if rank < 0 or (kind not in {"double", "group"} and any(caller == rank for caller, _ in target.calls))
    )


def softmax_shift(case: CaseLike, fault: Fault) -> str:
    """Why a fault of the maximum inside a softmax changes no result, "" for any other fault: a `subject.harmless` for
    programs that reduce no other maximum.

    exp(x - m) / sum exp(x - m) is the same for any m that all ranks subtract alike, as long as nothing overflows.
    """
    target = fault.target
    own = case.axes.get(target.axis, ())
    together = all(any(set(ranks) <= set(other) for other in fault.groups) for ranks in own)
    alike = fault.rank < 0 and (fault.kind in {"op", "stale"} or (fault.kind == "group" and bool(own) and together))
    shift = alike and target.op == "all_reduce" and target.reduce_op == "max"
    return "softmax is the same for any shift that all ranks subtract alike" if shift else ""


def _of_kind(kind: str, target: Target, axes: Mapping[str, Partition]) -> Iterator[Fault]:
    if target.op in _SILENT:
        return
    if kind == "op":
        unordered = "bool" in target.dtype or "complex" in target.dtype
        for change in () if unordered else _OPS.get(target.reduce_op, ()):
            yield Fault(kind=kind, target=target, change=change)
    elif kind == "group":
        for change, groups in _other_groups(target, axes).items():
            yield Fault(kind=kind, target=target, change=change, groups=groups)
    elif kind != "double" or target.op != "recv":
        yield Fault(kind=kind, target=target)


def _other_groups(target: Target, axes: Mapping[str, Partition]) -> dict[str, Partition]:
    """Name -> groups in which the target's call could be made by mistake, with the right shapes."""
    world = sorted({rank for groups in axes.values() for ranks in groups for rank in ranks})
    known = {**axes, "world": (tuple(world),)}
    own, size = known.get(target.axis), target.group_size
    if own is None or size == 1 or target.op not in _REGROUPED:
        return {}
    found: dict[str, Partition] = {}

    def others(groups: Partition) -> bool:
        return _comparable_groups(target, groups) not in [
            _comparable_groups(target, known) for known in (own, *found.values())
        ]

    for name, groups in known.items():
        sizes = {len(ranks) for ranks in groups}
        if (sizes == {size} or (target.op == "all_reduce" and sizes != {1})) and others(groups):
            found[name] = groups
    after = {rank: world[(i + 1) % len(world)] for i, rank in enumerate(world)}
    if size == len(world):
        name, made = "reversed", tuple(tuple(reversed(ranks)) for ranks in own)
    elif any(len(ranks) == size for groups in found.values() for ranks in groups):
        return found
    else:
        name, made = "shifted", tuple(tuple(after[rank] for rank in ranks) for ranks in own)
    return found | ({name: made} if others(made) else {})


def _comparable_groups(target: Target, groups: Partition) -> frozenset[object]:
    """Partitions that differ in the order within a group count as different, but not for an all_reduce, whose result
    does not depend on it.
    """
    return frozenset(map(frozenset, groups)) if target.op == "all_reduce" else frozenset(groups)
