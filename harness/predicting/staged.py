"""What a pipeline will cost: one rank of each kind of stage run dry, and its forwards and backwards played in order.

Stages that have as many layers and the same ends of the model are alike, so that one rank stands for them. It runs its
own program with the fewest micro-batches, and is taken apart into forwards and backwards: how long each takes, what a
forward leaves for its backward, and how much more each holds for a moment. From these follow, for the real number of
micro-batches and every stage,

    time      every stage plays its program: computations at their times, messages by the cost of a call
    memory    before any forward + micro-batches in flight x what one leaves + the most that a computation adds
    bytes     the closed form at the stage's coordinate

What follows the last backward of a stage comes after it; the step ends when the slowest stage has ended. Deep stages
lie on the straight line through two depths, as in harness.predicting.forecast. Units: seconds, bytes, FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from harness.engines.shapes.dry import DryEngine
from harness.mesh_axes import first_pipeline
from harness.predicting.clusters import Cluster
from harness.predicting.costs import route, seconds
from harness.predicting.figures import (
    DEPTHS,
    EQUAL,
    Forecast,
    Memory,
    StageForecast,
    Traffic,
    data_ranks,
    line,
    traffic,
)
from harness.predicting.segments import BACKWARD, FORWARD, MESSAGES, MeasuredStage, live, measured, on_the_line
from harness.predicting.states import States
from harness.predicting.timeline import together
from harness.protocols import ActionLike, CaseLike, PipelineLike, SpanLike, Subject

__all__ = ["staged_forecast"]


def staged_forecast(
    case: CaseLike,
    subject: Subject,
    pipeline_of: Callable[[CaseLike], PipelineLike],
    cluster: Cluster,
    engine: DryEngine,
    *,
    states: States | None = None,
    timeout_s: float = 60.0,
) -> Forecast:
    """Time and memory of every stage of the case; see harness.predicting.forecast.forecast."""
    pipeline = pipeline_of(case)
    ranks = first_pipeline(case.axes)
    first, unit = getattr(case, "repeating_layers", (0, 1))
    run: dict[int, MeasuredStage] = {}
    for kind in sorted(set(pipeline.alike)):
        depth = pipeline.layers[kind] / pipeline.chunks
        low, high = (first + unit * each for each in DEPTHS)
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
        _stage(index, pipeline, one, own, max(ends), bytes_, states)
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
        ledger=next((stage.ledger for stage in stages if stage.ledger != EQUAL), EQUAL),
        traffic=largest.traffic,
        events=events,
        stages=stages,
        bubble=_bubble(spans),
        bubble_stated=pipeline.bubble_stated,
        spans=tuple(map(tuple, spans)),
    )


def _stage(
    index: int,
    pipeline: PipelineLike,
    one: MeasuredStage,
    spans: Sequence[SpanLike],
    step_s: float,
    sent: Traffic | None,
    states: States | None,
) -> StageForecast:
    computed = [one.segments[span.action.kind, span.action.chunk, True] for span in spans]
    busy = together(*((1.0, segment.times) for segment in (*computed, one.rest)))
    idle_s = step_s - busy.total_s
    exposed = {**busy.exposed_s, MESSAGES: busy.exposed_s.get(MESSAGES, 0.0) + idle_s}
    program = [span.action for span in spans]

    def of(kind: str) -> float:
        return sum(seg.times.total_s for (each, _, later), seg in one.segments.items() if later and each == kind)

    return StageForecast(
        index=index,
        layers=pipeline.layers[index],
        live=live(program),
        forward_s=of(FORWARD),
        backward_s=of(BACKWARD),
        idle_s=idle_s,
        times=replace(busy, exposed_s=exposed, hidden_s={**busy.hidden_s, MESSAGES: 0.0}),
        memory=_memory(one, program, states),
        flops=sum(segment.flops for segment in computed),
        traffic=sent,
        ledger=one.ledger,
        run=one.rank,
    )


def _memory(one: MeasuredStage, program: Sequence[ActionLike], states: States | None) -> Memory:
    """The stage's memory over a whole step; what the optimizer keeps is there from the second step on."""
    held, peak, kept, seen = 0.0, 0.0, 0.0, set[tuple[str, int]]()
    for action in program:
        place = action.kind, action.chunk
        segment = one.segments[*place, place in seen]
        leaves = one.segments[FORWARD, action.chunk, True].left_bytes
        peak = max(peak, one.before_bytes + kept + held + segment.more_bytes)
        held += leaves if action.kind == FORWARD else -leaves
        if action.kind == BACKWARD and place not in seen:  # the gradients of this chunk have come, and stay
            kept += segment.left_bytes + leaves
        seen.add(place)
    peak = max(peak, one.before_bytes + kept + one.rest.more_bytes)
    sizes = {each.name: float(getattr(one.memory, each.name)) for each in fields(Memory)}
    if states and sizes["trained"]:
        gradients = states.gradient * sizes["learned"]
        peak += gradients - sizes["gradients"]
        sizes |= {"gradients": gradients, "optimizer": states.optimizer * sizes["trained"]}
    more = (live(program) - one.live) * one.segments[FORWARD, 0, True].left_bytes
    sizes |= {"saved": sizes["saved"] + more, "peak": peak + sizes["optimizer"]}
    return Memory(**sizes)


def _bubble(spans: Sequence[Sequence[SpanLike]]) -> float:
    busy = sum(span.end - span.start for own in spans for span in own)
    return float(1 - busy / (len(spans) * max(own[-1].end for own in spans)))
