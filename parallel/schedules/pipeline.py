"""A pipeline: how many ranks, chunks and micro-batches under which schedule, and which rank holds which virtual stage.

A *virtual stage* is one chunk of layers; virtual stages are numbered in the order in which a micro-batch passes them.
In a looped pipeline rank r holds the stages r, r+pp, r+2pp, ..; in a V-shaped one it holds r and 2pp-1-r.
Sources: GPipe arXiv:1811.06965, 1F1B and interleaved arXiv:2104.04473, zero bubble (ZB-H1, ZBV) arXiv:2401.10241.

The order in which a rank computes, for each schedule.

GPipe, 1F1B and interleaved are one rule with different warm-ups: `warm` forwards, then forward and backward in turn,
then the backwards that are left. ZB-H1 is 1F1B with each weight gradient put off by as many backwards as the rank's
number. Sources: Megatron-Core 0.16.1 `pipeline_parallel/schedules.py` (around.md 13.1, 13.2), arXiv:2401.10241
sections 2.1 and 6 (around.md 13.3).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
_V_SHAPED = ("zbv",)
_SPLIT = ("zb-h1", "zbv")


class Kind(StrEnum):
    """Kinds of work of a rank. `B` is the whole backward, or the input gradient alone where the schedule has `W`."""

    F = "F"
    B = "B"
    W = "W"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"

    @property
    def computes(self) -> bool:
        """Whether it is a computation; all others are messages."""
        return self in _COMPUTED


_COMPUTED = frozenset((Kind.F, Kind.B, Kind.W))


class Action(NamedTuple):
    """A computation or message of a rank; `stage` is the virtual stage that computes, sends or receives."""

    kind: Kind
    micro: int
    chunk: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro} on stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The shape of a pipeline that its schedule can run (rules: `reference.features.pipeline`).

    `group` is the number of micro-batches in a row per chunk (Megatron's microbatch_group_size_per_vp_stage, by
    default pp); only the interleaved schedule has it.
    """

    schedule: str
    ranks: int
    micro: int
    chunks: int = 1
    group: int | None = None

    @property
    def v_shaped(self) -> bool:
        """Whether rank r holds the virtual stages r and 2pp-1-r, so that rank 0 has the first and the last."""
        return self.schedule in _V_SHAPED

    @property
    def splits_backward(self) -> bool:
        """Whether the weight gradient (W) is computed apart from the input gradient (B)."""
        return self.schedule in _SPLIT

    @property
    def in_a_row(self) -> int:
        """Micro-batches in a row per chunk."""
        return self.ranks if self.group is None else self.group

    @property
    def virtual_stages(self) -> int:
        """Virtual stages on all ranks together."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage that is chunk number `chunk` of a rank."""
        return 2 * self.ranks - 1 - rank if self.v_shaped and chunk else chunk * self.ranks + rank

    def rank(self, stage: int) -> int:
        """The rank that holds a virtual stage."""
        place = stage % self.ranks
        return self.ranks - 1 - place if self.v_shaped and stage >= self.ranks else place

    def at(self, kind: Kind, micro: int, stage: int) -> Action:
        """The action of a virtual stage."""
        chunk = int(stage >= self.ranks) if self.v_shaped else stage // self.ranks
        return Action(kind, micro, chunk, stage)

    def action(self, kind: Kind, rank: int, chunk: int, micro: int) -> Action:
        """The action of one of a rank's chunks."""
        return Action(kind, micro, chunk, self.stage(rank, chunk))

    def needs(self, action: Action) -> list[Action]:
        """The computations that must be done before one: of the stage before it or behind it, and its own stage's."""
        kind, micro, _, stage = action
        if kind is Kind.W:
            return [action._replace(kind=Kind.B)]
        needs = [] if kind is Kind.F else [action._replace(kind=Kind.F)]
        other = stage - 1 if kind is Kind.F else stage + 1
        return needs + [self.at(kind, micro, other)] * (0 <= other < self.virtual_stages)


def warm_up(pipeline: Pipeline, rank: int) -> int:
    """Forwards of a rank before its first backward's own forward; for ZBV all forwards of the first chunk alone."""
    pp, micro, after = pipeline.ranks, pipeline.micro, pipeline.ranks - 1 - rank
    match pipeline.schedule:
        case "gpipe":
            return micro
        case "interleaved":
            return min(2 * after + (pipeline.chunks - 1) * pipeline.in_a_row, micro * pipeline.chunks)
        case "zbv":
            return min(2 * (pp - rank) - 1, micro)
        case _:
            return min(after, micro)


def forward_table(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """(chunk, micro-batch) of all forwards of any rank of a looped pipeline, in order."""
    group = pipeline.in_a_row if pipeline.chunks > 1 else pipeline.micro
    return tuple(
        (chunk, micro)
        for first in range(0, pipeline.micro, group)
        for chunk in range(pipeline.chunks)
        for micro in range(first, min(first + group, pipeline.micro))
    )


def backward_table(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """(chunk, micro-batch) of all backwards of any rank of a looped pipeline: the last chunk comes first."""
    return tuple((pipeline.chunks - 1 - chunk, micro) for chunk, micro in forward_table(pipeline))


def order(pipeline: Pipeline, rank: int) -> tuple[Action, ...]:
    """All computations of a rank in one step of training, in order."""
    if pipeline.schedule == "zbv":
        return _zbv(pipeline, rank)
    warm = warm_up(pipeline, rank)
    forwards = [pipeline.action(Kind.F, rank, *place) for place in forward_table(pipeline)]
    backwards = [pipeline.action(Kind.B, rank, *place) for place in backward_table(pipeline)]
    steady = chain.from_iterable(zip(forwards[warm:], backwards, strict=False))
    made = (*forwards[:warm], *steady, *backwards[len(forwards) - warm :])
    return _with_weights(made, put_off=rank) if pipeline.splits_backward else made


def orders(pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
    """The computations of all ranks."""
    return tuple(order(pipeline, rank) for rank in range(pipeline.ranks))


def _with_weights(made: Sequence[Action], put_off: int) -> tuple[Action, ...]:
    """Every backward's weight gradient, `put_off` backwards later; those that are left come at the end."""
    weights = iter([action._replace(kind=Kind.W) for action in made if action.kind is Kind.B])
    filled: list[Action] = []
    seen = 0
    for action in made:
        filled.append(action)
        if action.kind is Kind.B:
            seen += 1
            if seen > put_off:
                filled.append(next(weights))
    return (*filled, *weights)


def _zbv(pipeline: Pipeline, rank: int) -> tuple[Action, ...]:
    """ZBV for at least 2pp-1 micro-batches, without the actions of those that the pipeline does not have."""
    pp, drawn = pipeline.ranks, max(2 * pipeline.ranks - 1, pipeline.micro)
    down, up = [(kind, 0) for kind in (Kind.F, Kind.B, Kind.W)], [(kind, 1) for kind in (Kind.F, Kind.B, Kind.W)]
    with_forward = drawn - (2 * pp - 1 - rank)
    phases = [
        down[:1] * (2 * (pp - rank) - 1),
        [up[0], down[0]] * rank,
        up * (pp - rank),
        (down + up) * with_forward,
        (down[1:] + up) * (drawn - pp - with_forward),
        [down[1], up[1]] * rank,
        down[1:] * (pp - rank),
        [up[2]] * rank,
        [down[2]] * rank,
    ]
    counted: Counter[tuple[Kind, int]] = Counter()
    made: list[Action] = []
    for kind, chunk in chain.from_iterable(phases):
        micro = counted[kind, chunk]
        counted[kind, chunk] += 1
        if micro < pipeline.micro:
            made.append(pipeline.action(kind, rank, chunk, micro))
    return tuple(made)
