"""A rank of a pipeline stage run dry and taken apart: its forwards and backwards, and what follows the last of them.

Of each: how long it takes, what it leaves behind, the most that it holds beyond what it found. Units: seconds, bytes,
FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from harness.engines.shapes.dry import DryEngine
from harness.errors import NotComputed
from harness.ledger import Event, unmapped
from harness.mesh_axes import first_pipeline
from harness.predicting.clusters import Cluster
from harness.predicting.dry_run import DryRank, dry_run
from harness.predicting.figures import EQUAL, Memory, compared, prices
from harness.predicting.meter import START, TO_BACKWARD, TO_FORWARD
from harness.predicting.timeline import AFTER_BACKWARD, Times, spent_until, together
from harness.protocols import ActionLike, CaseLike, PipelineLike, Subject

__all__ = ["BACKWARD", "FORWARD", "MESSAGES", "MeasuredStage", "Segment", "live", "measured", "on_the_line"]

FORWARD, BACKWARD = "F", "B"
MESSAGES = "pipeline"
"""The phase of messages between stages."""
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
    """One rank of this stage, run dry and taken apart.

    Raises NotComputed when a call has no price, and when the rank did not follow its program.
    """
    at = first_pipeline(case.axes)[stage]
    (rank,) = dry_run(case, subject, engine, (at,), text=str(case), timeout_s=timeout_s).ranks
    if names := unmapped(rank.events):
        raise NotComputed(f"operator {names} of torch is not known, so it has no price", ranks=(at,), positions=())
    program = pipeline.programs[stage]
    computations = [together[0] for together in program if _computes(together[0])]
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
        memory=Memory(
            trained=rank.trained,
            learned=rank.learned,
            parameters=rank.parameter_bytes,
            gradients=rank.gradient_bytes,
            optimizer=rank.optimizer_bytes,
            saved=rank.saved_bytes,
            peak=0,
        ),
        live=live(computations),
        ledger=compared(case, subject, rank),
        events=rank.events,
    )


def _cut(rank: DryRank, ends: Sequence[int], until: Sequence[Times]) -> list[Segment]:
    """What lies between these numbers of stretches, with what was spent until each."""
    made: list[Segment] = []
    spent, first, found = Times(), 0, 0
    for end, times in zip(ends, until, strict=True):
        own = rank.stretches[first:end]
        level = own[-1].held_bytes if own else found
        made.append(
            Segment(
                times=together((1.0, times), (-1.0, spent)),
                left_bytes=level - found,
                more_bytes=max((stretch.peak_bytes for stretch in own), default=found) - found,
                flops=sum(stretch.flops for stretch in own),
            )
        )
        spent, first, found = times, end, level
    return made


def on_the_line(drawn: Sequence[tuple[float, MeasuredStage]]) -> MeasuredStage:
    """One stage of several depths, each with its weight."""
    if len(drawn) == 1:
        return drawn[0][1]

    def segment(found: Sequence[Segment]) -> Segment:
        weighted = [(weight, one) for (weight, _), one in zip(drawn, found, strict=True)]
        return Segment(
            times=together(*((weight, one.times) for weight, one in weighted)),
            left_bytes=sum(weight * one.left_bytes for weight, one in weighted),
            more_bytes=sum(weight * one.more_bytes for weight, one in weighted),
            flops=sum(weight * one.flops for weight, one in weighted),
        )

    first = drawn[0][1]
    return replace(
        first,
        segments={key: segment([one.segments[key] for _, one in drawn]) for key in first.segments},
        rest=segment([one.rest for _, one in drawn]),
        before_bytes=sum(weight * one.before_bytes for weight, one in drawn),
        memory=Memory(
            **{
                each.name: sum(weight * getattr(one.memory, each.name) for weight, one in drawn)
                for each in fields(Memory)
            }
        ),
        ledger=next((one.ledger for _, one in drawn if one.ledger != EQUAL), EQUAL),
        events=tuple(event for _, one in drawn for event in one.events),
    )


def _computes(action: ActionLike) -> bool:
    return action.kind in (FORWARD, BACKWARD)


def _ends(rank: DryRank, program: Sequence[Sequence[ActionLike]]) -> list[int]:
    """Where each computation ends, as the number of stretches before; and where what follows the last one ends.

    A batch of messages belongs to the computation behind it. Between two of them, forward and backward are told apart
    by what autograd computes and by the phases of calls. Raises NotComputed when the rank did not follow its program.
    """
    by_ticket = {event.call_index: event for event in rank.events}
    messages = [event.call_index for event in rank.events if event.phase == MESSAGES]
    batches = [at for at, together in enumerate(program) if not _computes(together[0]) for _ in together]
    batch_of = dict(zip(messages, batches, strict=False))
    computed = [at for at, together in enumerate(program) if _computes(together[0])]
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
            positions=(),
        )
    return [*ends, len(rank.stretches)]


def live(program: Sequence[ActionLike]) -> int:
    """The most micro-batches of a chunk that are forward and not yet backward."""
    live = most = 0
    for action in program:
        live += {FORWARD: 1, BACKWARD: -1}.get(action.kind, 0)
        most = max(most, live)
    return most
