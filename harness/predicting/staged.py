"""Forecast of a pipeline: one rank of each kind of stage run dry, and its forwards and backwards played in order.

Stages that have as many layers and the same ends of the model are alike, so that one rank stands for them. The rank
runs its own program with the fewest micro-batches, and is taken apart into forwards and backwards. Measured are the
time of each, what a forward leaves for its backward, and how much more each holds for a moment. From these follow, for
the real number of micro-batches and every stage,

    time      every stage plays its program: computations at their times, messages by the cost of a call
    memory    before any forward + micro-batches in flight x what one leaves + the most that a computation adds
    bytes     the closed form at the stage's coordinate

The work behind the last backward of a stage comes after it; the step ends when the slowest stage has ended. Deep stages
lie on the straight line through two depths, as in harness.predicting.forecast. Units: seconds, bytes, FLOPs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.engines.shapes.dry import DryEngine
from harness.errors import NotComputed
from harness.ledger import Event
from harness.mesh_axes import first_pipeline
from harness.predicting.clusters import Cluster
from harness.predicting.costs import route, seconds
from harness.predicting.dry_run import DryRank, dry_rank
from harness.predicting.figures import (
    BACKWARD,
    FORWARD,
    Forecast,
    Memory,
    StageForecast,
    States,
    Traffic,
    compared,
    data_ranks,
    first_difference,
    line,
    live,
    prices,
    traffic,
    two_depths,
)
from harness.predicting.meter import START, TO_BACKWARD, TO_FORWARD
from harness.predicting.timeline import AFTER_BACKWARD, Times, spent_until, together
from harness.protocols import ActionLike, CaseLike, PipelineLike, SpanLike, Subject

MESSAGES = "pipeline"
"""The phase of messages between stages."""
_COMPUTED = (FORWARD, BACKWARD)
_BEFORE_BACKWARD = ("data", "forward", "loss", "metric")
_Key = tuple[str, int, bool]
"""Kind and chunk of a computation, and whether it is a later one of them than the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A computation that was measured: what it leaves behind, and the most that it holds beyond what it found."""

    times: Times
    left_bytes: float
    more_bytes: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStage:
    """A rank of a stage that was run: its computations, what follows the last of them, and what it found before."""

    rank: int
    segments: Mapping[_Key, Segment]
    rest: Segment
    before_bytes: float
    memory: Memory
    live: int
    ledger: str
    events: tuple[Event, ...] = field(repr=False)


def measured(
    case: CaseLike,
    stage: int,
    subject: Subject,
    pipeline: PipelineLike,
    cluster: Cluster,
    engine: DryEngine,
    timeout_s: float,
) -> MeasuredStage:
    """A rank of this stage, run dry and taken apart.

    Raises NotComputed when a call has no price, and when the rank did not follow its program.
    """
    at = first_pipeline(case.axes)[stage]
    rank = dry_rank(case, subject, engine, at, timeout_s)
    program = pipeline.programs[stage]
    computations = [together[0] for together in program if together[0].kind in _COMPUTED]
    ends = _ends(rank, program)
    price = prices(case, cluster, at)

    def free(event: Event) -> tuple[str, float]:
        return (MESSAGES, 0.0) if event.phase == MESSAGES else price(event)

    until = spent_until(ends, rank.stretches, rank.events, cluster.device.flops_per_s(case.dtype), free)
    made = _cut(rank, ends, until)
    segments: dict[_Key, Segment] = {}
    for action, segment in zip(computations, made[:-1], strict=True):
        segments.setdefault((action.kind, action.chunk, False), segment)
        segments[action.kind, action.chunk, True] = segment
    key = computations[0].kind, computations[0].chunk
    before = made[0].left_bytes - segments[*key, True].left_bytes  # the first forward found nothing, as if all were its
    segments[*key, False] = replace(made[0], more_bytes=made[0].more_bytes - before)
    return MeasuredStage(
        rank=at,
        segments=segments,
        rest=made[-1],
        before_bytes=before,
        memory=Memory.of(rank, 0),
        live=live(computations),
        ledger=compared(case, subject, rank),
        events=rank.events,
    )


def _cut(rank: DryRank, ends: Sequence[int], until: Sequence[Times]) -> list[Segment]:
    """Segments between these numbers of stretches, with what was spent until each."""
    made: list[Segment] = []
    spent, first, start_bytes = Times(), 0, 0
    for end, times in zip(ends, until, strict=True):
        own = rank.stretches[first:end]
        level = own[-1].held_bytes if own else start_bytes
        made.append(
            Segment(
                times=together((1.0, times), (-1.0, spent)),
                left_bytes=level - start_bytes,
                more_bytes=max((stretch.peak_bytes for stretch in own), default=start_bytes) - start_bytes,
                flops=sum(stretch.flops for stretch in own),
            )
        )
        spent, first, start_bytes = times, end, level
    return made


def on_the_line(drawn: Sequence[tuple[float, MeasuredStage]]) -> MeasuredStage:
    """A stage of several depths, each with its weight."""
    if len(drawn) == 1:
        return drawn[0][1]
    numbers = ("segments", "rest", "before_bytes", "memory")
    return replace(
        drawn[0][1],
        **{name: together(*((weight, getattr(one, name)) for weight, one in drawn)) for name in numbers},
        ledger=first_difference(one.ledger for _, one in drawn),
        events=tuple(event for _, one in drawn for event in one.events),
    )


def _ends(rank: DryRank, program: Sequence[Sequence[ActionLike]]) -> list[int]:
    """Where each computation ends, as the number of stretches before; and where what follows the last one ends.

    A batch of messages belongs to the computation behind it. Between two of them, autograd's work and the phases of
    calls distinguish forward and backward. Raises NotComputed when the rank did not follow its program.
    """
    by_ticket = {event.call_index: event for event in rank.events}
    messages = [event.call_index for event in rank.events if event.phase == MESSAGES]
    batches = [at for at, together in enumerate(program) if together[0].kind not in _COMPUTED for _ in together]
    batch_of = dict(zip(messages, batches, strict=False))
    computed = [at for at, together in enumerate(program) if together[0].kind in _COMPUTED]
    ends: list[int] = []
    for number, stretch in enumerate(rank.stretches, 1):
        if len(ends) == len(computed):
            break
        now = computed[len(ends)]
        event = by_ticket.get(stretch.ticket) if stretch.then == START else None
        side = {TO_FORWARD: FORWARD, TO_BACKWARD: BACKWARD}.get(stretch.then, "")
        if event is not None and event.phase == MESSAGES:
            ends += [number] * (batch_of.get(event.call_index, -1) > now)
        elif event is not None and event.phase in AFTER_BACKWARD and now == computed[-1]:
            ends.append(number)
        elif event is not None:
            side = FORWARD if event.phase in _BEFORE_BACKWARD else BACKWARD
        if side and side != program[now][0].kind and (now + 1 in computed or now == computed[-1]):
            ends.append(number)
    ends += [len(rank.stretches)] * (len(ends) == len(computed) - 1)
    if len(messages) != len(batches) or len(ends) < len(computed):
        raise NotComputed(
            f"rank {rank.rank} issued {len(messages)} messages between stages and {len(ends)} computations could be "
            f"told apart, and its program has {len(batches)} and {len(computed)}",
            ranks=(rank.rank,),
        )
    return [*ends, len(rank.stretches)]


def staged_forecast(
    case: CaseLike,
    subject: Subject,
    pipeline_of: Callable[[CaseLike], PipelineLike],
    cluster: Cluster,
    engine: DryEngine,
    states: States | None,
    timeout_s: float,
) -> Forecast:
    """Time and memory of every stage of the case; see harness.predicting.forecast.forecast."""
    pipeline = pipeline_of(case)
    ranks = first_pipeline(case.axes)
    low, high = two_depths(case)
    run: dict[int, MeasuredStage] = {}
    for kind in sorted(set(pipeline.alike)):
        depth = pipeline.layers[kind] / pipeline.chunks
        deep = depth > low + high
        drawn = []
        for weight, each in zip(line(depth, low, high), (low, high), strict=True) if deep else [(1.0, None)]:
            sample = pipeline.sample(each)
            drawn.append((weight, measured(sample, kind, subject, pipeline_of(sample), cluster, engine, timeout_s)))
        run[kind] = on_the_line(drawn)
    every = [run[kind] for kind in pipeline.alike]
    events = tuple(event for one in run.values() for event in one.events)
    size = max((event.payload_bytes for event in events if event.phase == MESSAGES), default=0)

    def message_s(sender: int, receiver: int) -> float:
        return seconds("send", size, route((ranks[sender], ranks[receiver]), cluster), cluster.algorithm)

    def lasts(stage: int, action: ActionLike) -> float:
        return every[stage].segments[action.kind, action.chunk, True].times.total_s

    spans = pipeline.spans(lasts, message_s)
    ends = [float(own[-1].end) + one.rest.times.total_s for own, one in zip(spans, every, strict=True)]
    sent = traffic(case, subject, ranks)
    stages = tuple(
        _stage_forecast(index, pipeline, one, own, max(ends), bytes_, states)
        for index, (one, own, bytes_) in enumerate(zip(every, spans, sent, strict=True))
    )
    largest = max(stages, key=lambda stage: stage.memory.peak)
    busiest = max(stages, key=lambda stage: stage.times.compute_s)
    return Forecast(
        case=case,
        cluster=cluster,
        times=busiest.times,
        memory=largest.memory,
        flops=busiest.flops,
        tokens=int(getattr(case, "tokens", 0)) * case.micro * data_ranks(case),
        ledger=first_difference(stage.ledger for stage in stages),
        traffic=largest.traffic,
        events=events,
        stages=stages,
        bubble_stated=pipeline.bubble_stated,
        spans=tuple(map(tuple, spans)),
    )


def _stage_forecast(
    index: int,
    pipeline: PipelineLike,
    stage: MeasuredStage,
    spans: Sequence[SpanLike],
    step_s: float,
    sent: Traffic | None,
    states: States | None,
) -> StageForecast:
    computed = [stage.segments[span.action.kind, span.action.chunk, True] for span in spans]
    busy = together(*((1.0, segment.times) for segment in (*computed, stage.rest)))
    idle_s = step_s - busy.total_s
    exposed = {**busy.exposed_s, MESSAGES: busy.exposed_s.get(MESSAGES, 0.0) + idle_s}
    program = [span.action for span in spans]

    def of(kind: str) -> float:
        return sum(seg.times.total_s for (each, _, later), seg in stage.segments.items() if later and each == kind)

    return StageForecast(
        index=index,
        layers=pipeline.layers[index],
        live=live(program),
        forward_s=of(FORWARD),
        backward_s=of(BACKWARD),
        idle_s=idle_s,
        times=replace(busy, exposed_s=exposed, hidden_s={**busy.hidden_s, MESSAGES: 0.0}),
        memory=_memory(stage, program, states),
        flops=sum(segment.flops for segment in computed),
        traffic=sent,
        ledger=stage.ledger,
        run=stage.rank,
    )


def _memory(stage: MeasuredStage, program: Sequence[ActionLike], states: States | None) -> Memory:
    """The stage's memory over a whole step; what the optimizer keeps is there from the second step on."""
    leaves_bytes, peak, kept, seen = 0.0, 0.0, 0.0, set[tuple[str, int]]()
    for action in program:
        place = action.kind, action.chunk
        segment = stage.segments[*place, place in seen]
        leaves = stage.segments[FORWARD, action.chunk, True].left_bytes
        peak = max(peak, stage.before_bytes + kept + leaves_bytes + segment.more_bytes)
        leaves_bytes += leaves if action.kind == FORWARD else -leaves
        if action.kind == BACKWARD and place not in seen:  # the gradients of this chunk have come, and stay
            kept += segment.left_bytes + leaves
        seen.add(place)
    peak = max(peak, stage.before_bytes + kept + stage.rest.more_bytes)
    more = (live(program) - stage.live) * stage.segments[FORWARD, 0, True].left_bytes
    return replace(stage.memory, saved=stage.memory.saved + more, peak=peak).over_steps(states)
