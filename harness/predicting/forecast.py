"""What a case will cost on a cluster that is not here: time and memory of a rank, from its closed form and a dry run.

One rank is run dry for one step of one micro-batch, its ledger held against the closed form, and its trace played on
the cluster (harness.predicting.timeline); a step is `micro` times that micro-batch, and what follows the last backward
once.

A deep model is measured at two depths: every further layer adds the same calls, FLOPs and bytes, so that all is a
straight line in the depth; a case whose first layers differ, or whose layers repeat in units, states it as
`repeating_layers`, (how many differ, layers of a unit). `whole` runs the model itself beside that, for times and
ledger; memory is always that of the line, from two micro-batches, because the second meets the gradients of the first.
With `states` (AdamW in mixed precision) gradients and optimizer are by formula instead, since the program trains with
those of its own dtype: its peak, less its gradients, plus theirs. Units: seconds, bytes, FLOPs; bytes of calls are
payloads of one rank in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from harness.differences import differences
from harness.engines.shapes.dry import DryEngine
from harness.errors import NotComputed, RequestError
from harness.ledger import Event, unmapped, wire_bytes
from harness.predicting.clusters import Cluster
from harness.predicting.costs import Route, route, seconds
from harness.predicting.dry_run import DryRank, dry_run
from harness.predicting.meter import START, Stretch
from harness.predicting.states import States
from harness.predicting.timeline import Times, parts, play, together
from harness.protocols import CaseLike, Subject
from harness.subject import named_axes, stated
from harness.terms import closed_forms

__all__ = ["DEPTHS", "EQUAL", "Forecast", "Memory", "Traffic", "forecast", "traffic"]

EQUAL = "equal"
"""What `Forecast.ledger` says when the dry run issued exactly the events of the closed form."""
DEPTHS = (3, 5)
"""Layers at which a deep model is measured: few, but enough that the first and the last are told from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank; `peak` is the most that all tensors of the program held at once, temporary ones too.

    `trained` are the elements that the optimizer steps; 0 when the program steps no torch optimizer, and then gradients
    and optimizer are not known. `learned` are those of all parameters that want a gradient.
    """

    trained: float
    learned: float
    parameters: float
    gradients: float
    optimizer: float
    saved: float
    peak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Calls and bytes of one rank in one step, from the closed form."""

    calls: int
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One case on one cluster. `times` are those of one step, `tokens` those of all ranks in it; 0: the case has none.

    `ledger` says how the dry run compares with the closed form: "equal", the first difference, or that none is stated.
    `depths` are the layers that were run, () when it was the model itself. `events` is the ledger of the rank.
    """

    case: CaseLike
    cluster: Cluster
    times: Times
    memory: Memory
    flops: float
    tokens: int
    ledger: str
    traffic: Traffic | None
    depths: tuple[int, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def step_s(self) -> float:
        """One step."""
        return self.times.total_s

    @property
    def tokens_per_s_per_rank(self) -> float:
        """Throughput of one rank's share; NaN where the case has no tokens."""
        if not self.tokens:
            return math.nan
        return self.tokens / self.step_s / self.case.world_size if self.step_s else 0.0

    @property
    def room_bytes(self) -> float:
        """The device's memory."""
        return self.cluster.device.memory_gib * 2**30

    @property
    def fits(self) -> bool:
        """Whether the peak fits into the device."""
        return self.memory.peak <= self.room_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A model that was run: times and FLOPs of a micro-batch, times of what follows, memory, how the ledger compares.

    `memory.peak` is that until the last backward, `after_bytes` the peak from there on, both without what the optimizer
    keeps from step to step.
    """

    micro: Times
    rest: Times
    micro_flops: float
    memory: Memory
    after_bytes: float
    ledger: str
    events: tuple[Event, ...] = field(repr=False)


_Parts = Sequence[tuple[float, _Sample]]
"""Samples of several depths, each with its weight in the line."""


def forecast(
    case: CaseLike,
    subject: Subject,
    cluster: Cluster,
    engine: DryEngine,
    *,
    whole: bool = False,
    states: States | None = None,
    timeout_s: float = 60.0,
) -> Forecast:
    """Time and memory of the case on the cluster; `states` None: gradients and optimizer are the program's own.

    Raises what the engine raises, RequestError for an unknown peak and for several pipeline stages.
    """
    if (stages := len(named_axes(case, subject).get("pp", ((0,),))[0])) > 1:
        rule = "predict runs one rank, and pipeline stages differ in layers, messages and waiting"
        raise RequestError(f"pp={stages}: {rule}; legal: pp=1")
    cluster.device.flops_per_s(case.dtype)
    layers = int(getattr(case, "layers", 0))
    first, unit = getattr(case, "repeating_layers", (0, 1))
    low, high = (first + unit * depth for depth in DEPTHS)
    depths = (low, high) if layers > high else ()
    two = 2 if states else min(2, case.micro)  # float32 gradients are there from the first micro-batch on
    at = [case.but(layers=depth) for depth in depths] or [case]
    line: _Parts = [
        (weight, _sample(each, two, subject, cluster, engine, timeout_s))
        for weight, each in zip(_line(layers, low, high) if depths else (1.0,), at, strict=True)
    ]
    apart = whole and (bool(depths) or two > case.micro)
    itself: _Parts = [(1.0, _sample(case, 1, subject, cluster, engine, timeout_s))] if apart else line
    samples = [sample for _, sample in (*itself, *line)]
    return Forecast(
        case=case,
        cluster=cluster,
        times=together(
            *((case.micro * weight, sample.micro) for weight, sample in itself),
            *((weight, sample.rest) for weight, sample in itself),
        ),
        memory=_memory(line, states),
        flops=case.micro * sum(weight * sample.micro_flops for weight, sample in itself),
        tokens=int(getattr(case, "tokens", 0)) * case.micro * _data_ranks(case),
        ledger=next((sample.ledger for sample in samples if sample.ledger != EQUAL), EQUAL),
        traffic=traffic(case, subject),
        depths=() if whole else depths,
        events=itself[0][1].events if whole or not depths else (),
    )


def traffic(case: CaseLike, subject: Subject) -> Traffic | None:
    """Calls and bytes of rank 0 in one step by the closed form; None when the subject states none of all fields."""
    terms = stated(case.but(steps=1), subject)
    form = None if terms is None else closed_forms(terms, (0,), named_axes(case, subject))[0]
    if form is None or form.partial:
        return None
    calls = form.complete.items()
    return Traffic(
        calls=form.complete.total(),
        payload_bytes=sum(count * line.payload_bytes for line, count in calls),
        wire_bytes=sum(count * wire_bytes(line.op, line.payload_bytes, line.group_size) for line, count in calls),
    )


def _sample(
    case: CaseLike, micro: int, subject: Subject, cluster: Cluster, engine: DryEngine, timeout_s: float
) -> _Sample:
    """Rank 0 of the case, one step of `micro` micro-batches."""
    short = case.but(steps=1, micro=micro)
    (rank,) = dry_run(short, subject, engine, (0,), text=str(short), timeout_s=timeout_s).ranks
    if names := unmapped(rank.events):
        raise NotComputed(f"operator {names} of torch is not known, so it has no price", ranks=(0,), positions=())
    times, rest = play(rank.stretches, rank.events, cluster.device.flops_per_s(case.dtype), _prices(short, cluster))
    place = [stretch.ticket if stretch.then == START else -1 for stretch in rank.stretches]
    first, last = parts(rank.events)
    if first < 0:  # no call tells one micro-batch from the next
        times = together((1 / micro, times))
    end = place.index(last) + 1 if last >= 0 else len(place)
    return _Sample(
        micro=times,
        rest=rest,
        micro_flops=rank.flops / micro,
        memory=Memory(
            trained=rank.trained,
            learned=rank.learned,
            parameters=rank.parameter_bytes,
            gradients=rank.gradient_bytes,
            optimizer=rank.optimizer_bytes,
            saved=rank.saved_bytes,
            peak=_peak(rank.stretches[:end]),
        ),
        after_bytes=_peak(rank.stretches[end:]),
        ledger=_compared(short, subject, rank),
        events=rank.events,
    )


def _peak(stretches: Sequence[Stretch]) -> int:
    return max((stretch.peak_bytes for stretch in stretches), default=0)


def _prices(case: CaseLike, cluster: Cluster) -> Callable[[Event], tuple[str, float]]:
    """What each event costs: its group is the one of rank 0 on the event's axis."""
    routes: dict[str, Route] = {
        axis: route(next(ranks for ranks in lists if 0 in ranks), cluster) for axis, lists in case.axes.items()
    }

    def price(event: Event) -> tuple[str, float]:
        way = routes.get(event.axis)
        if way is None or way.size != event.group_size:
            listed = [int(word) for word in event.axis.split(",") if word.isdigit()]
            way = routes[event.axis] = route(listed or range(event.group_size), cluster)
        return way.link, seconds(event.op, event.payload_bytes, way, cluster.algorithm)

    return price


def _compared(case: CaseLike, subject: Subject, rank: DryRank) -> str:
    terms = stated(case, subject)
    if terms is None:
        return "the subject states no closed form"
    parted = differences(rank.events, terms, (rank.rank,), axes=named_axes(case, subject))
    return f"differs: {parted[0]}" if parted else EQUAL


def _memory(line: _Parts, states: States | None) -> Memory:
    """Memory in the line; what the optimizer keeps is there from the second step on, whatever else is."""

    def mixed(name: str) -> float:
        return sum(weight * float(getattr(sample.memory, name)) for weight, sample in line)

    sizes = {one.name: mixed(one.name) for one in fields(Memory)}
    sizes["peak"] = max(sizes["peak"], sum(weight * sample.after_bytes for weight, sample in line))
    if states and sizes["trained"]:
        gradients = states.gradient * sizes["learned"]
        sizes["peak"] += gradients - sizes["gradients"]
        sizes |= {"gradients": gradients, "optimizer": states.optimizer * sizes["trained"]}
    sizes["peak"] += sizes["optimizer"]
    return Memory(**sizes)


def _line(layers: int, low: int, high: int) -> tuple[float, float]:
    """The weights of the two measured depths in the straight line through them, at this many layers."""
    share = (layers - low) / (high - low)
    return 1 - share, share


def _data_ranks(case: CaseLike) -> int:
    lists: Mapping[str, tuple[tuple[int, ...], ...]] = case.axes
    return len(lists["dp"][0]) if "dp" in lists else 1
