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

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from harness.engines.shapes.dry import DryEngine
from harness.errors import NotComputed, RequestError
from harness.ledger import Event, unmapped
from harness.mesh_axes import PIPELINE, stage_count
from harness.predicting.clusters import Cluster
from harness.predicting.dry_run import dry_run
from harness.predicting.figures import DEPTHS, EQUAL, Forecast, Memory, compared, data_ranks, line, prices, traffic
from harness.predicting.meter import START, Stretch
from harness.predicting.staged import staged_forecast
from harness.predicting.states import States
from harness.predicting.timeline import Times, parts, play, together
from harness.protocols import CaseLike, Subject
from harness.subject import named_axes

__all__ = ["forecast"]


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

    Raises what the engine raises, RequestError for an unknown peak, and for several pipeline stages of a subject that
    has no `pipeline` (harness.protocols).
    """
    cluster.device.flops_per_s(case.dtype)
    if (stages := stage_count(named_axes(case, subject))) > 1:
        if (pipeline := getattr(subject, "pipeline", None)) is None:
            rule = "the subject has no attribute pipeline, which says what its stages do and when"
            raise RequestError(f"{PIPELINE}={stages}: {rule}; legal: {PIPELINE}=1")
        return staged_forecast(case, subject, pipeline, cluster, engine, states=states, timeout_s=timeout_s)
    layers = int(getattr(case, "layers", 0))
    first, unit = getattr(case, "repeating_layers", (0, 1))
    low, high = (first + unit * depth for depth in DEPTHS)
    depths = (low, high) if layers > high else ()
    two = 2 if states else min(2, case.micro)  # float32 gradients are there from the first micro-batch on
    at = [case.but(layers=depth) for depth in depths] or [case]
    drawn: _Parts = [
        (weight, _sample(each, two, subject, cluster, engine, timeout_s))
        for weight, each in zip(line(layers, low, high) if depths else (1.0,), at, strict=True)
    ]
    apart = whole and (bool(depths) or two > case.micro)
    itself: _Parts = [(1.0, _sample(case, 1, subject, cluster, engine, timeout_s))] if apart else drawn
    samples = [sample for _, sample in (*itself, *drawn)]
    return Forecast(
        case=case,
        cluster=cluster,
        times=together(
            *((case.micro * weight, sample.micro) for weight, sample in itself),
            *((weight, sample.rest) for weight, sample in itself),
        ),
        memory=_memory(drawn, states),
        flops=case.micro * sum(weight * sample.micro_flops for weight, sample in itself),
        tokens=int(getattr(case, "tokens", 0)) * case.micro * data_ranks(case),
        ledger=next((sample.ledger for sample in samples if sample.ledger != EQUAL), EQUAL),
        traffic=traffic(case, subject)[0],
        depths=() if whole else depths,
        events=itself[0][1].events if whole or not depths else (),
    )


def _sample(
    case: CaseLike, micro: int, subject: Subject, cluster: Cluster, engine: DryEngine, timeout_s: float
) -> _Sample:
    """Rank 0 of the case, one step of `micro` micro-batches."""
    short = case.but(steps=1, micro=micro)
    (rank,) = dry_run(short, subject, engine, (0,), text=str(short), timeout_s=timeout_s).ranks
    if names := unmapped(rank.events):
        raise NotComputed(f"operator {names} of torch is not known, so it has no price", ranks=(0,), positions=())
    times, rest = play(rank.stretches, rank.events, cluster.device.flops_per_s(case.dtype), prices(short, cluster))
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
        ledger=compared(short, subject, rank),
        events=rank.events,
    )


def _peak(stretches: Sequence[Stretch]) -> int:
    return max((stretch.peak_bytes for stretch in stretches), default=0)


def _memory(drawn: _Parts, states: States | None) -> Memory:
    """Memory in the line; what the optimizer keeps is there from the second step on, whatever else is."""

    def mixed(name: str) -> float:
        return sum(weight * float(getattr(sample.memory, name)) for weight, sample in drawn)

    sizes = {one.name: mixed(one.name) for one in fields(Memory)}
    sizes["peak"] = max(sizes["peak"], sum(weight * sample.after_bytes for weight, sample in drawn))
    if states and sizes["trained"]:
        gradients = states.gradient * sizes["learned"]
        sizes["peak"] += gradients - sizes["gradients"]
        sizes |= {"gradients": gradients, "optimizer": states.optimizer * sizes["trained"]}
    sizes["peak"] += sizes["optimizer"]
    return Memory(**sizes)
