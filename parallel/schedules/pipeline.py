"""A pipeline: how many ranks, chunks and micro-batches under which schedule, and which rank holds which virtual stage.

A *virtual stage* is one chunk of layers; virtual stages are numbered in the order in which a micro-batch passes them.
In a looped pipeline rank r holds the stages r, r+pp, r+2pp, ..; in a V-shaped one it holds r and 2pp-1-r.
Sources: GPipe arXiv:1811.06965, 1F1B and interleaved arXiv:2104.04473, zero bubble (ZB-H1, ZBV) arXiv:2401.10241.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from reference.errors import CaseError

__all__ = ["SCHEDULES", "Action", "Kind", "Pipeline"]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
_V_SHAPED = ("zbv",)
_SPLIT = ("zb-h1", "zbv")


class Kind(StrEnum):
    """What a rank does. `B` is the whole backward, or the input gradient alone where the schedule has `W`."""

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
    """One computation or message of a rank; `stage` is the virtual stage that computes, sends or receives."""

    kind: Kind
    micro: int
    chunk: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro} on stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The shape of a pipeline. Raises CaseError when the schedule cannot run it.

    `group` is the number of micro-batches in a row per chunk (Megatron's microbatch_group_size_per_vp_stage, by
    default pp); only the interleaved schedule has it.
    """

    schedule: str
    pp: int
    micro: int
    chunks: int = 1
    group: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise CaseError("schedule", self.schedule, "is not a schedule", " ".join(SCHEDULES))
        for key, value in (("pp", self.pp), ("micro", self.micro), ("chunks", self.chunks)):
            if value < 1:
                raise CaseError(key, value, "must be at least 1", "1")
        if self.v_shaped:
            if self.chunks != 2:
                raise CaseError("chunks", self.chunks, f"schedule={self.schedule} has two chunks on every rank", "2")
        elif self.schedule != "interleaved" and self.chunks != 1:
            raise CaseError("chunks", self.chunks, f"schedule={self.schedule} has one chunk on every rank", "1")
        if self.schedule == "interleaved":
            self._check_interleaved()
        elif self.group is not None:
            raise CaseError("group", self.group, "only schedule=interleaved has groups", "leave it out")

    def _check_interleaved(self) -> None:
        """Megatron-Core's rules: pp <= group <= micro, and the last group is no smaller than pp."""
        if self.pp < 2:
            raise CaseError("pp", self.pp, "schedule=interleaved needs at least two ranks", "2")
        if self.chunks < 2:
            raise CaseError("chunks", self.chunks, "schedule=interleaved needs at least two chunks on every rank", "2")
        if self.micro < self.pp:
            rule = f"schedule=interleaved needs at least pp={self.pp} micro-batches"
            raise CaseError("micro", self.micro, rule, str(self.pp))
        if not self.pp <= self.in_a_row <= self.micro:
            rule = f"must be from pp={self.pp} to micro={self.micro}"
            raise CaseError("group", self.in_a_row, rule, str(self.pp))
        if 0 < self.micro % self.in_a_row < self.pp:
            rule = (
                f"the last group would have {self.micro % self.in_a_row} micro-batches, "
                f"fewer than pp={self.pp} (group={self.in_a_row})"
            )
            raise CaseError("micro", self.micro, rule, str(self.micro - self.micro % self.in_a_row))

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
        return self.pp if self.group is None else self.group

    @property
    def virtual_stages(self) -> int:
        """Virtual stages on all ranks together."""
        return self.pp * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage that is chunk number `chunk` of a rank."""
        return 2 * self.pp - 1 - rank if self.v_shaped and chunk else chunk * self.pp + rank

    def rank(self, stage: int) -> int:
        """The rank that holds a virtual stage."""
        place = stage % self.pp
        return self.pp - 1 - place if self.v_shaped and stage >= self.pp else place

    def at(self, kind: Kind, micro: int, stage: int) -> Action:
        """The action of a virtual stage."""
        chunk = int(stage >= self.pp) if self.v_shaped else stage // self.pp
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

    def check_rank(self, rank: int) -> None:
        """Raise CaseError when the pipeline has no such rank."""
        if not 0 <= rank < self.pp:
            raise CaseError("rank", rank, f"is not a rank of pp={self.pp}", f"0 to {self.pp - 1}")
