"""Memory and bytes of the ranks of a case of any size, by closed form and dry run.

Stages that have as many layers and the same ends of the model are alike, so that one rank is run dry for each kind. Its
ledger is held against the closed form, and its step is taken apart into forwards and backwards
(harness.predicting.stages). From these follow, for the real number of micro-batches and every stage,

    memory    before any forward + micro-batches in flight x what one leaves + the most that a computation adds
    bytes     the closed form at the stage's coordinate

A deep model is measured at two depths. Every further layer adds the same calls, FLOPs and bytes, so that all is a
straight line in the depth. A case whose first layers differ, or whose layers repeat in units, states it as
`repeating_layers`, (how many differ, layers of a unit). With `states` (AdamW in mixed precision) gradients and
optimizer are by formula instead, since the program trains with those of its own dtype. Gradients are there from the
first micro-batch on then. Units: bytes, FLOPs; bytes of calls are payloads of one rank in a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.mesh_axes import PIPELINE, first_pipeline, stage_count
from shardproof.harness.predicting.dry_run import dry_run
from shardproof.harness.predicting.figures import (
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
    traffic,
    two_depths,
)
from shardproof.harness.predicting.stages import (
    MeasuredStage,
    OneStage,
    computations,
    measured,
    on_the_line,
    weighted_sum,
)
from shardproof.harness.protocols import ActionLike, CaseLike, PipelineLike, Subject
from shardproof.harness.subject import named_axes


def forecast(
    case: CaseLike,
    subject: Subject,
    engine: DryEngine,
    *,
    whole: bool = False,
    states: States | None = None,
    timeout_s: float = 60.0,
) -> Forecast:
    """Memory and bytes of the case; `states` None: gradients and optimizer are the program's own.

    `whole`: a model of one stage is run itself too, for one micro-batch, and gives the ledger. Raises what the engine
    raises, and NotComputed for a rank that cannot be taken apart by its program. RequestError for several pipeline
    stages of a subject that has no `pipeline` (harness.protocols).
    """
    pipeline, (low, high) = _pipeline(case, subject, states), two_depths(case)
    depth_of = {kind: pipeline.layers[kind] / pipeline.chunks for kind in sorted(set(pipeline.alike))}

    def run_dry(sample: CaseLike, kind: int) -> MeasuredStage:
        return measured(sample, _pipeline(sample, subject, states), kind, subject, engine, timeout_s)

    def at(kind: int, depth: int | None) -> MeasuredStage:
        one, further = run_dry(sample := pipeline.sample(depth), kind), case.micro - sample.micro
        if not one.rest.flops or further <= 0 or pipeline.chunks > 1:
            return one
        # Gradients of weights that are put off: what follows the last backward grows with every micro-batch.
        before = run_dry(sample.but(micro=sample.micro - 1), kind)
        return replace(one, rest=weighted_sum((1.0 + further, one.rest), (-float(further), before.rest)))

    run = {
        kind: on_the_line(list(zip(line(depth, low, high), (at(kind, low), at(kind, high)), strict=True)))
        if depth > high
        else at(kind, None)
        for kind, depth in depth_of.items()
    }
    made = _composed(case, subject, pipeline, run, states)
    if not isinstance(pipeline, OneStage):
        return made
    deep = max(depth_of.values()) > high
    made = replace(made, stages=(), depths=(low, high) if deep else (), events=() if deep else made.events)
    if not deep or not whole:
        return made
    short = case.but(steps=1, micro=1)
    (itself,) = dry_run(short, subject, engine, (0,), text=str(short), timeout_s=timeout_s)
    return replace(made, events=itself.events, ledger=first_difference((compared(short, subject, itself), made.ledger)))


def _composed(
    case: CaseLike, subject: Subject, pipeline: PipelineLike, run: Mapping[int, MeasuredStage], states: States | None
) -> Forecast:
    """The step of all stages; `run` has one of each kind."""
    every, sent = [run[kind] for kind in pipeline.alike], traffic(case, subject, first_pipeline(case.axes))
    stages = tuple(
        _stage_forecast(index, pipeline, one, bytes_, states)
        for index, (one, bytes_) in enumerate(zip(every, sent, strict=True))
    )
    largest = max(stages, key=lambda stage: stage.memory.peak)
    return Forecast(
        case=case,
        memory=largest.memory,
        flops=max(stage.flops for stage in stages),
        tokens=int(getattr(case, "tokens", 0)) * case.micro * data_ranks(case),
        ledger=first_difference(stage.ledger for stage in stages),
        traffic=largest.traffic,
        events=tuple(event for one in run.values() for event in one.events),
        stages=stages,
    )


def _pipeline(case: CaseLike, subject: Subject, states: States | None) -> PipelineLike:
    """The stages of a case. Raises RequestError for several of a subject that says nothing of them."""
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
    program = computations(pipeline.programs[index])
    return StageForecast(
        index=index,
        layers=pipeline.layers[index],
        live=live(program),
        memory=_memory(stage, program, states),
        flops=stage.rest.flops + sum(segment.flops for segment in stage.of_step(program)),
        traffic=sent,
        ledger=stage.ledger,
        run=stage.rank,
    )


def _memory(stage: MeasuredStage, program: Sequence[ActionLike], states: States | None) -> Memory:
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
    more = (live(program) - stage.live) * stage.middle(FORWARD, 0).left_bytes
    return replace(stage.memory, saved=stage.memory.saved + more, peak=peak).over_steps(states)
