"""Memory and bytes of the ranks of a case of any size, by closed form and dry run.

Stages that have as many layers and the same ends of the model are alike, so that one rank is run dry for each kind. Its
ledger is held against the closed form, and its step is taken apart into forwards, backwards, and the rest behind them.
From these follow, for the real number of micro-batches and every stage,

    memory    before any forward + micro-batches in flight x what one leaves + the most that a computation adds
    bytes     the closed form at the stage's coordinate

A rank is run dry for a few micro-batches; a case without stages is a pipeline of one. The first micro-batch of a step,
the last and those between may differ: parameters are gathered before the first, gradients summed with the last. At most
three are measured, and the middle one stands for all between. A program of one stage may hide where its backwards begin
and end, or run several a micro-batch. Then it is measured whole, and every micro-batch is an equal share of it.

A deep model is measured at two depths. Every further layer adds the same calls, FLOPs and bytes, so all of these are
straight lines in the depth. A case whose first layers differ, or whose layers repeat in units, states it as
`repeating_layers`, (how many differ, layers of a unit). With `states` (AdamW in mixed precision) gradients and
optimizer are given by formula instead, since the program trains with those of its own dtype. Then gradients are there
before the first micro-batch. Units: bytes, FLOPs; bytes of calls are payloads of one rank in a step.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.errors import NotComputed, RequestError
from shardproof.harness.mesh_axes import PIPELINE, first_pipeline, stage_count
from shardproof.harness.predicting.dry_run import START, TO_BACKWARD, TO_FORWARD, DryRank, dry_run
from shardproof.harness.predicting.figures import (
    BACKWARD,
    FORWARD,
    Forecast,
    Memory,
    StageForecast,
    States,
    Traffic,
    compare_with_closed_form,
    count_live,
    data_ranks,
    first_difference,
    line_weights,
    traffic_by_rank,
    two_depths,
)
from shardproof.harness.protocols import ActionLike, CaseLike, PipelineLike, Subject
from shardproof.harness.subject import named_axes

T = TypeVar("T")

MESSAGES = "pipeline"
"""The phase of messages between stages."""
_COMPUTED = (FORWARD, BACKWARD)
_AFTER_BACKWARD = ("grad_sync", "step")
_BEFORE_BACKWARD = ("data", "forward", "loss", "metric")
_MEASURED = 3
"""The micro-batches of a step that are measured: the first, one between, the last."""


class _Computation(NamedTuple):
    """A computation of a program without stages."""

    kind: str
    micro: int
    chunk: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStage:
    """The pipeline of a case without stages (harness.protocols): every micro-batch forward and backward, in turn."""

    case: CaseLike
    least: int = 1

    chunks = 1
    alike = (0,)
    bubble_stated = None

    @property
    def layers(self) -> tuple[int]:
        """The layers of the model."""
        return (int(getattr(self.case, "layers", 0)),)

    @property
    def programs(self) -> tuple[tuple[tuple[_Computation], ...]]:
        """Forward and backward of every micro-batch."""
        return (tuple((_Computation(kind, micro),) for micro in range(self.case.micro) for kind in _COMPUTED),)

    def sample(self, depth: int | None) -> CaseLike:
        """A step of at most three micro-batches, and at least `least`."""
        micro = max(self.least, min(_MEASURED, self.case.micro))
        return self.case.but(steps=1, micro=micro, **({} if depth is None else {"layers": depth}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A computation that was measured: the bytes that it leaves, and the most that it holds beyond those it found."""

    left_bytes: float
    more_bytes: float
    flops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStage:
    """A rank of a stage that was run: its computations, what follows the last of them, and what it found before.

    `segments`: kind and chunk -> those of the first micro-batch to the last. `grown_bytes`: what each micro-batch
    leaves from the second one on, where they follow each other.
    """

    rank: int
    segments: Mapping[tuple[str, int], tuple[Segment, ...]]
    rest: Segment
    before_bytes: float
    grown_bytes: float
    memory: Memory
    live: int
    ledger: str

    def middle(self, kind: str, chunk: int) -> Segment:
        """The measurement that stands for computations between the first and the last. For forwards it is the last one,
        in which nothing is done that happens once.
        """
        own = self.segments[kind, chunk]
        return own[-1] if kind == FORWARD else own[len(own) // 2]

    def of_step(self, program: Sequence[ActionLike]) -> list[Segment]:
        """The computations of a program, in its order."""
        counts = Counter((action.kind, action.chunk) for action in program)
        made, seen = list[Segment](), Counter[tuple[str, int]]()
        for action in program:
            place = action.kind, action.chunk
            own = self.segments[place]
            seen[place] += 1
            if seen[place] == counts[place]:
                made.append(own[-1])
            else:
                made.append(own[seen[place] - 1] if seen[place] < len(own) else self.middle(*place))
        return made

    def left_bytes(self, micro: int, chunk: int, micros: int) -> float:
        """The bytes that the forward of one of `micros` leaves: as measured, or as its backward frees them."""
        own = self.segments[FORWARD, chunk]
        if micro < len(own) - 1 or len(own) == micros:
            return own[micro].left_bytes
        return self.grown_bytes - self.middle(BACKWARD, chunk).left_bytes

    def kept_bytes(self, micro: int, chunk: int) -> float:
        """The bytes that stay when a backward has ended: gradients after the first one, perhaps gathered parameters
        after later ones.
        """
        forward, backward = self.segments[FORWARD, chunk], self.segments[BACKWARD, chunk]
        if micro < max(1, len(backward) - 1):
            return forward[micro].left_bytes + backward[micro].left_bytes
        return self.grown_bytes


def select_computations(program: Sequence[Sequence[ActionLike]]) -> list[ActionLike]:
    """The forwards and backwards of a program, in its order, without its messages."""
    return [step[0] for step in program if step[0].kind in _COMPUTED]


def measure_stage(
    case: CaseLike, pipeline: PipelineLike, stage: int, subject: Subject, engine: DryEngine, timeout_s: float
) -> MeasuredStage:
    """A rank of this stage, run dry and taken apart.

    Raises NotComputed when the rank of a pipeline did not follow its program.
    """
    at = first_pipeline(case.axes)[stage]
    (rank,) = dry_run(case, subject, engine, (at,), text=str(case), timeout_s=timeout_s)
    program = pipeline.programs[stage]
    actions = select_computations(program)
    ends = (
        _turning_points(rank, len(actions)) if isinstance(pipeline, OneStage) else _ends_of_computations(rank, program)
    )
    made_stage = partial(
        MeasuredStage, rank=at, memory=Memory.of(rank, 0), ledger=compare_with_closed_form(case, subject, rank)
    )
    if not ends:
        share, rest = _share_segments(case, rank)
        nothing = Segment(left_bytes=0.0, more_bytes=0.0, flops=0.0)
        shares = {(FORWARD, 0): (share,), (BACKWARD, 0): (nothing,)}
        return made_stage(segments=shares, rest=rest, before_bytes=0.0, grown_bytes=0.0, live=1)
    made = _cut_segments(rank, ends)
    segments: dict[tuple[str, int], tuple[Segment, ...]] = {}
    for action, segment in zip(actions, made[:-1], strict=True):
        place = action.kind, action.chunk
        segments[place] = (*segments.get(place, ()), segment)
    first = actions[0].kind, actions[0].chunk
    before, known = 0.0, segments[first]
    if len(known) > 1:  # the model is built in the first forward, which otherwise needs what a later one needs
        before = known[0].left_bytes - known[-1].left_bytes
        own = replace(known[0], left_bytes=known[-1].left_bytes, more_bytes=known[-1].more_bytes)
        segments[first] = (own, *known[1:])
    alone = isinstance(pipeline, OneStage) and len(made) > 2 * 2  # two forwards, two backwards, and the rest
    grown = made[2].left_bytes + made[3].left_bytes if alone else 0.0
    return made_stage(
        segments=segments, rest=made[-1], before_bytes=before, grown_bytes=grown, live=count_live(actions)
    )


def _share_segments(case: CaseLike, rank: DryRank) -> tuple[Segment, Segment]:
    """A micro-batch as an equal share of everything before the first call after backward; and the rest."""
    after = {event.call_index for event in rank.events if event.phase in _AFTER_BACKWARD}
    stops = (number for number, one in enumerate(rank.stretches) if one.then == START and one.ticket in after)
    step, rest = _cut_segments(rank, [next(stops, len(rank.stretches)), len(rank.stretches)])
    share = replace(step, flops=step.flops / case.micro, left_bytes=0.0)
    return share, replace(rest, more_bytes=rest.more_bytes + step.left_bytes)


def _cut_segments(rank: DryRank, ends: Sequence[int]) -> list[Segment]:
    """The segments of a rank's stretches; `ends` has the number of stretches up to the end of each."""
    made: list[Segment] = []
    first, start_bytes = 0, 0
    for end in ends:
        own = rank.stretches[first:end]
        level = own[-1].held_bytes if own else start_bytes
        made.append(
            Segment(
                left_bytes=level - start_bytes,
                more_bytes=max((stretch.peak_bytes for stretch in own), default=start_bytes) - start_bytes,
                flops=sum(stretch.flops for stretch in own),
            )
        )
        first, start_bytes = end, level
    return made


def weighted_sum(*parts: tuple[float, T]) -> T:
    """The sum of numbers, or of dataclasses of them, each multiplied by its weight."""
    _, first = parts[0]
    if is_dataclass(first) and not isinstance(first, type):
        sums: dict[str, Any] = {
            field.name: weighted_sum(*((weight, getattr(part, field.name)) for weight, part in parts))
            for field in fields(first)
        }
        return replace(first, **sums)
    return cast(T, sum(weight * cast(float, part) for weight, part in parts))


def on_the_line(drawn: Sequence[tuple[float, MeasuredStage]]) -> MeasuredStage:
    """A stage from weighted measurements at several depths. Raises NotComputed unless all have the same parts."""
    first = drawn[0][1]
    if len({tuple((place, len(own)) for place, own in one.segments.items()) for _, one in drawn}) > 1:
        raise NotComputed("its forwards and backwards are others in a deeper model", ranks=(first.rank,))
    numbers = {
        name: weighted_sum(*((weight, getattr(one, name)) for weight, one in drawn))
        for name in ("rest", "before_bytes", "grown_bytes", "memory")
    }
    segments = {
        place: tuple(
            weighted_sum(*((weight, one.segments[place][number]) for weight, one in drawn))
            for number in range(len(own))
        )
        for place, own in first.segments.items()
    }
    return replace(first, **numbers, segments=segments, ledger=first_difference(one.ledger for _, one in drawn))


def _turning_points(rank: DryRank, computations: int) -> list[int]:
    """`_ends_of_computations` of a program without messages: where backward begins and ends. Empty unless these are the
    ends of so many `computations`.
    """
    turns = [at for at, stretch in enumerate(rank.stretches, 1) if stretch.then in (TO_BACKWARD, TO_FORWARD)]
    turns += [len(rank.stretches)] * (len(turns) == computations - 1)
    return [*turns, len(rank.stretches)] if len(turns) == computations else []


def _ends_of_computations(rank: DryRank, program: Sequence[Sequence[ActionLike]]) -> list[int]:
    """Where each computation ends, and what follows the last one, each as the number of stretches up to its end.

    A batch of messages belongs to the computation after it. Between two batches, autograd's work and the phases of
    calls tell forward from backward. Raises NotComputed when the rank did not follow its program.
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
        elif event is not None and event.phase in _AFTER_BACKWARD and now == computed[-1]:
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


def forecast_case(
    case: CaseLike,
    subject: Subject,
    engine: DryEngine,
    *,
    whole: bool = False,
    states: States | None = None,
    timeout_s: float = 60.0,
) -> Forecast:
    """Memory and bytes of the case; `states` None: gradients and optimizer are the program's own.

    `whole`: a deep model of one stage is run at its own depth too, for one micro-batch, and its ledger is compared.
    Raises what the engine raises, NotComputed for a rank that cannot be taken apart by its program, and RequestError
    for several pipeline stages of a subject that has no `pipeline` (harness.protocols).
    """
    pipeline, (low, high) = _pipeline_of_case(case, subject, states), two_depths(case)
    depth_of = {kind: pipeline.layers[kind] / pipeline.chunks for kind in sorted(set(pipeline.alike))}

    def run_dry(sample: CaseLike, kind: int) -> MeasuredStage:
        return measure_stage(sample, _pipeline_of_case(sample, subject, states), kind, subject, engine, timeout_s)

    def at(kind: int, depth: int | None) -> MeasuredStage:
        one, further = run_dry(sample := pipeline.sample(depth), kind), case.micro - sample.micro
        if not one.rest.flops or further <= 0 or pipeline.chunks > 1:
            return one
        # Gradients of weights are deferred: what follows the last backward grows with every micro-batch.
        before = run_dry(sample.but(micro=sample.micro - 1), kind)
        return replace(one, rest=weighted_sum((1.0 + further, one.rest), (-float(further), before.rest)))

    run = {
        kind: on_the_line(list(zip(line_weights(depth, low, high), (at(kind, low), at(kind, high)), strict=True)))
        if depth > high
        else at(kind, None)
        for kind, depth in depth_of.items()
    }
    made = _compose_forecast(case, subject, pipeline, run, states)
    if not isinstance(pipeline, OneStage):
        return made
    deep = max(depth_of.values()) > high
    made = replace(made, stages=(), depths=(low, high) if deep else ())
    if not deep or not whole:
        return made
    short = case.but(steps=1, micro=1)
    (itself,) = dry_run(short, subject, engine, (0,), text=str(short), timeout_s=timeout_s)
    return replace(made, ledger=first_difference((compare_with_closed_form(short, subject, itself), made.ledger)))


def _compose_forecast(
    case: CaseLike, subject: Subject, pipeline: PipelineLike, run: Mapping[int, MeasuredStage], states: States | None
) -> Forecast:
    """The step of all stages; `run` has one of each kind."""
    every, sent = [run[kind] for kind in pipeline.alike], traffic_by_rank(case, subject, first_pipeline(case.axes))
    stages = tuple(
        _stage_forecast(index, pipeline, one, bytes_, states)
        for index, (one, bytes_) in enumerate(zip(every, sent, strict=True))
    )
    largest = max(stages, key=lambda stage: stage.memory.peak)
    return Forecast(
        case=case,
        memory=largest.memory,
        tokens=int(getattr(case, "tokens", 0)) * case.micro * data_ranks(case),
        ledger=first_difference(stage.ledger for stage in stages),
        traffic=largest.traffic,
        stages=stages,
    )


def _pipeline_of_case(case: CaseLike, subject: Subject, states: States | None) -> PipelineLike:
    """The stages of a case. Raises RequestError if it has several and the subject says nothing about them."""
    if (stages := stage_count(named_axes(case, subject))) == 1:
        return OneStage(case=case, least=2 if states else 1)
    if (pipeline := getattr(subject, "pipeline", None)) is None:
        rule = "the subject has no attribute pipeline, which says what its stages do"
        raise RequestError(f"{PIPELINE}={stages}: {rule}; legal: {PIPELINE}=1")
    made: PipelineLike = pipeline(case)
    return made


def _stage_forecast(
    index: int, pipeline: PipelineLike, stage: MeasuredStage, sent: Traffic | None, states: States | None
) -> StageForecast:
    program = select_computations(pipeline.programs[index])
    return StageForecast(
        index=index,
        layers=pipeline.layers[index],
        live=count_live(program),
        memory=_memory_of_stage(stage, program, states),
        traffic=sent,
        ledger=stage.ledger,
        run=stage.rank,
    )


def _memory_of_stage(stage: MeasuredStage, program: Sequence[ActionLike], states: States | None) -> Memory:
    """The stage's memory over a whole step; what the optimizer keeps is there from the second step on."""
    kept, peak, micros = 0.0, 0.0, len({action.micro for action in program})
    left: dict[tuple[int, int], float] = {}
    if states:  # gradients are there before the first micro-batch
        kept = sum(stage.kept_bytes(0, chunk) for chunk in {action.chunk for action in program})
    for action, segment in zip(program, stage.of_step(program), strict=True):
        micro, chunk = action.micro, action.chunk
        first = states and micro == 0 and action.kind == BACKWARD
        more_bytes = (stage.middle(BACKWARD, chunk) if first else segment).more_bytes
        peak = max(peak, stage.before_bytes + kept + sum(left.values()) + more_bytes)
        if action.kind == FORWARD:
            left[micro, chunk] = stage.left_bytes(micro, chunk, micros)
        else:
            del left[micro, chunk]
            kept += 0.0 if first else stage.kept_bytes(micro, chunk)
    peak = max(peak, stage.before_bytes + kept + stage.rest.more_bytes)
    more = (count_live(program) - stage.live) * stage.middle(FORWARD, 0).left_bytes
    return replace(stage.memory, saved=stage.memory.saved + more, peak=peak).over_steps(states)
