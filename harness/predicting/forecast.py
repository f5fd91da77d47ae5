"""Cost of a case on a cluster that is not here: time and memory of a rank, by closed form and dry run.

A rank is run dry for one step of one or two micro-batches, its ledger held against the closed form. Its trace is played
on the cluster (harness.predicting.timeline). A step is `micro` micro-batches, and what follows the last backward once.

A deep model is measured at two depths. Every further layer adds the same calls, FLOPs and bytes, so that all is a
straight line in the depth. A case whose first layers differ, or whose layers repeat in units, states it as
`repeating_layers`, (how many differ, layers of a unit). `whole` runs the model itself beside that, for times and
ledger. Memory is always that of the line, from two micro-batches, because the second meets the gradients of the first.
With `states` (AdamW in mixed precision) gradients and optimizer are by formula instead, since the program trains with
those of its own dtype. The peak is then its own, less its gradients, plus theirs. Units: seconds, bytes, FLOPs; bytes
of calls are payloads of one rank in a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.engines.shapes.dry import DryEngine
from harness.errors import RequestError
from harness.ledger import Event
from harness.mesh_axes import PIPELINE, stage_count
from harness.predicting.clusters import Cluster
from harness.predicting.dry_run import dry_rank
from harness.predicting.figures import (
    Forecast,
    Memory,
    States,
    compared,
    data_ranks,
    first_difference,
    line,
    prices,
    traffic,
    two_depths,
)
from harness.predicting.meter import START, Stretch
from harness.predicting.staged import staged_forecast
from harness.predicting.timeline import Times, parts, play, together
from harness.protocols import CaseLike, Subject
from harness.subject import named_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """A model that was run: times and FLOPs of a micro-batch, times of what follows, and memory.

    `memory.peak` is that until the last backward, `after_bytes` the peak from there on, both without what the optimizer
    keeps from step to step.
    """

    micro: Times
    rest: Times
    micro_flops: float
    memory: Memory
    after_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A sample, its weight in the line through all depths, how its ledger compares, and that ledger."""

    weight: float
    sample: _Sample
    ledger: str
    events: tuple[Event, ...]


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
        return staged_forecast(case, subject, pipeline, cluster, engine, states, timeout_s)
    layers = int(getattr(case, "layers", 0))
    low, high = two_depths(case)
    depths = (low, high) if layers > high else ()
    two = 2 if states else min(2, case.micro)  # float32 gradients are there from the first micro-batch on

    on = subject, cluster, engine, timeout_s
    at = [case.but(layers=depth) for depth in depths] or [case]
    weights = line(layers, low, high) if depths else (1.0,)
    drawn = [_run(weight, each.but(steps=1, micro=two), *on) for weight, each in zip(weights, at, strict=True)]
    itself = [_run(1.0, case.but(steps=1, micro=1), *on)] if whole and (depths or two > case.micro) else drawn
    model, timed = (together(*((one.weight, one.sample) for one in runs)) for runs in (drawn, itself))
    peak = max(model.memory.peak, model.after_bytes)
    return Forecast(
        case=case,
        cluster=cluster,
        times=together((case.micro, timed.micro), (1.0, timed.rest)),
        memory=replace(model.memory, peak=peak).over_steps(states),
        flops=case.micro * timed.micro_flops,
        tokens=int(getattr(case, "tokens", 0)) * case.micro * data_ranks(case),
        ledger=first_difference(one.ledger for one in (*itself, *drawn)),
        traffic=traffic(case, subject)[0],
        depths=() if whole else depths,
        events=itself[0].events if whole or not depths else (),
    )


def _run(
    weight: float, case: CaseLike, subject: Subject, cluster: Cluster, engine: DryEngine, timeout_s: float
) -> _Run:
    """Rank 0 of the case, one step."""
    rank, price = dry_rank(case, subject, engine, 0, timeout_s), prices(case, cluster)
    times, rest = play(rank.stretches, rank.events, cluster.device.flops_per_s(case.dtype), price)
    place = [stretch.ticket if stretch.then == START else -1 for stretch in rank.stretches]
    first, last = parts(rank.events)
    end = place.index(last) + 1 if last >= 0 else len(place)
    sample = _Sample(
        micro=times if first >= 0 else together((1 / case.micro, times)),  # no call tells micro-batches apart
        rest=rest,
        micro_flops=rank.flops / case.micro,
        memory=Memory.of(rank, _peak(rank.stretches[:end])),
        after_bytes=_peak(rank.stretches[end:]),
    )
    return _Run(weight=weight, sample=sample, ledger=compared(case, subject, rank), events=rank.events)


def _peak(stretches: Sequence[Stretch]) -> int:
    return max((stretch.peak_bytes for stretch in stretches), default=0)
