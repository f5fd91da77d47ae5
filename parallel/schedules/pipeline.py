"""A pipeline: how many ranks, chunks and micro-batches under which schedule, and which rank holds which virtual stage.

A *virtual stage* is one chunk of layers; virtual stages are numbered in the order in which a micro-batch passes them.
Rank r holds the stages r, r+pp, r+2pp, ..

Each rank computes by one rule: `warm` forwards, then forward and backward in turn, then the backwards that are left.
The schedule decides how many `warm` are. Sources: GPipe arXiv:1811.06965, 1F1B and interleaved arXiv:2104.04473,
Megatron-Core 0.16.1 `pipeline_parallel/schedules.py` (around.md 13.1, 13.2).
"""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Kind(StrEnum):
    """Kinds of work of a rank: computations (forward, backward) and messages."""

    F = "F"
    B = "B"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"


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
    def in_a_row(self) -> int:
        """Micro-batches in a row per chunk."""
        return self.ranks if self.group is None else self.group

    @property
    def virtual_stages(self) -> int:
        """Virtual stages on all ranks together."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage that is chunk number `chunk` of a rank."""
        return chunk * self.ranks + rank

    def rank(self, stage: int) -> int:
        """The rank that holds a virtual stage."""
        return stage % self.ranks

    def at(self, kind: Kind, micro: int, stage: int) -> Action:
        """The action of a virtual stage."""
        return Action(kind, micro, stage // self.ranks, stage)

    def action(self, kind: Kind, rank: int, chunk: int, micro: int) -> Action:
        """The action of one of a rank's chunks."""
        return Action(kind, micro, chunk, self.stage(rank, chunk))


def warm_up(pipeline: Pipeline, rank: int) -> int:
    """Forwards of a rank before its first backward's own forward."""
    micro, after = pipeline.micro, pipeline.ranks - 1 - rank
    match pipeline.schedule:
        case "gpipe":
            return micro
        case "interleaved":
            return min(2 * after + (pipeline.chunks - 1) * pipeline.in_a_row, micro * pipeline.chunks)
        case _:
            return min(after, micro)


def forward_table(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """(chunk, micro-batch) of all forwards of any rank, in order."""
    group = pipeline.in_a_row if pipeline.chunks > 1 else pipeline.micro
    return tuple(
        (chunk, micro)
        for first in range(0, pipeline.micro, group)
        for chunk in range(pipeline.chunks)
        for micro in range(first, min(first + group, pipeline.micro))
    )


def backward_table(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """(chunk, micro-batch) of all backwards of any rank: the last chunk comes first."""
    return tuple((pipeline.chunks - 1 - chunk, micro) for chunk, micro in forward_table(pipeline))


def order(pipeline: Pipeline, rank: int) -> tuple[Action, ...]:
    """All computations of a rank in one step of training, in order."""
    warm = warm_up(pipeline, rank)
    forwards = [pipeline.action(Kind.F, rank, *place) for place in forward_table(pipeline)]
    backwards = [pipeline.action(Kind.B, rank, *place) for place in backward_table(pipeline)]
    steady = chain.from_iterable(zip(forwards[warm:], backwards, strict=False))
    return (*forwards[:warm], *steady, *backwards[len(forwards) - warm :])


def bubble_stated(pipeline: Pipeline) -> Fraction | None:
    """Closed form of the share of all ranks' time in which they compute nothing; None where none is known.

    For stages and messages alike that take no time to send. GPipe, 1F1B: (pp-1)/(micro+pp-1), arXiv:2104.04473 section
    2.2.1. Interleaved, group=pp and micro a multiple of pp: (pp-1)/(chunks micro+pp-1), section 2.2.2.
    """
    pp, micro = pipeline.ranks, pipeline.micro
    if pipeline.schedule == "interleaved" and (pipeline.in_a_row != pp or micro % pp):
        return None
    return Fraction(pp - 1, pipeline.chunks * micro + pp - 1)
