"""Laws of any set of programs: everything computed once, nothing before its inputs, messages in order.

Every check takes programs, so that it can be seen to fail on a wrong one, and returns what it found, in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from parallel.schedules.messages import Program, counterpart, peer
from parallel.schedules.pipeline import Action, Kind, Pipeline


class Sends(StrEnum):
    """How sends complete: at once, as one batch with their neighbours, or one by one when the receive is there."""

    BUFFERED = "buffered"
    BATCHED = "batched"
    BLOCKING = "blocking"


def delivery(pipeline: Pipeline) -> tuple[Sends, int]:
    """The sends and the number of process groups between two ranks with which the programs of a pipeline are legal.

    Interleaved on two ranks, activations and gradients pass both ways in one batch and would be swapped in one group
    (around.md 13.4). ZBV: both pass both ways between all neighbours, and a receive comes when its input is needed.
    """
    if pipeline.v_shaped:
        return Sends.BUFFERED, 2
    return Sends.BATCHED, 2 if pipeline.schedule == "interleaved" and pipeline.ranks == 2 else 1


def check_complete(pipeline: Pipeline, made: Sequence[Program]) -> list[str]:
    """Every micro-batch passes every virtual stage exactly once, forward and backward, on the stage's rank."""
    kinds = (Kind.F, Kind.B, Kind.W) if pipeline.splits_backward else (Kind.F, Kind.B)
    breaches: list[str] = []
    for rank, steps in enumerate(made):
        seen = Counter(action for step in steps for action in step if action.kind.computes)
        due = Counter(
            pipeline.action(kind, rank, chunk, micro)
            for kind in kinds
            for chunk in range(pipeline.chunks)
            for micro in range(pipeline.micro)
        )
        breaches += [f"rank {rank}: {action} {seen[action]} times, not once" for action in due if seen[action] != 1]
        breaches += [f"rank {rank}: {action} is not of this pipeline" for action in seen if action not in due]
    return breaches


def check_legal(pipeline: Pipeline, made: Sequence[Program], sends: Sends, channels: int) -> list[str]:
    """Run all programs against each other; returns what is computed before its input, swapped, or waited for forever.

    Between two ranks the k-th send meets the k-th receive, as in torch.distributed. With `channels=2` activations and
    gradients go over two process groups, so that only messages of one direction are in one order.
    """
    run = _Run(pipeline, made, sends, channels)
    while any([run.advance(rank) for rank in range(pipeline.ranks)]):
        pass
    return [*run.breaches, *run.stuck()]


def live(made: Program, until: Kind = Kind.B) -> int:
    """The most forwards of which the rank keeps activations at once, until their B or their W, in chunks."""
    now = most = 0
    for action in (action for step in made for action in step):
        now += (action.kind is Kind.F) - (action.kind is until)
        most = max(most, now)
    return most


def live_stated(pipeline: Pipeline, rank: int) -> int:
    """Closed form of `live` until B, in chunks; a chunk is 1/chunks of a rank's layers.

    Until W it is min(pp, micro) on every rank of ZB-H1, and the same as until B for ZBV.
    """
    pp, micro, chunks = pipeline.ranks, pipeline.micro, pipeline.chunks
    match pipeline.schedule:
        case "gpipe":
            return micro
        case "interleaved":
            warm = 2 * (pp - 1 - rank) + (chunks - 1) * pipeline.in_a_row
            return min(warm + 1, micro * chunks)
        case "zbv":
            return min(2 * pp, micro + min(micro, rank + 1))
        case _:
            return min(pp - rank, micro)


def _is_send(action: Action) -> bool:
    return action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


class _Run:
    """The programs in the midst of running: where each rank is, what it has, and what was posted between ranks."""

    def __init__(self, pipeline: Pipeline, made: Sequence[Program], sends: Sends, channels: int) -> None:
        self.pipeline, self.sends, self.channels = pipeline, sends, channels
        one_by_one = sends is Sends.BLOCKING
        self.made = [[(a,) for step in steps for a in step] if one_by_one else list(steps) for steps in made]
        self.at = [0] * len(made)
        self.posted = [False] * len(made)
        self.done: set[Action] = set()
        self.sent: dict[tuple[int, int, int], list[Action]] = {}
        self.received: dict[tuple[int, int, int], list[Action]] = {}
        self.waits: list[list[tuple[tuple[int, int, int], bool, int]]] = [[] for _ in made]
        self.breaches: list[str] = []

    def advance(self, rank: int) -> bool:
        """Run a rank until it waits; returns whether it moved."""
        moved = False
        while self.at[rank] < len(self.made[rank]):
            step = self.made[rank][self.at[rank]]
            if not self.posted[rank]:
                self.posted[rank] = moved = True
                self.waits[rank] = [wait for action in step for wait in self._issue(rank, action)]
            if any(len(self._side(sends)[channel]) <= index for channel, sends, index in self.waits[rank]):
                break
            self.done.update(action for action in step if not action.kind.computes)
            self.at[rank] += 1
            self.posted[rank] = False
            moved = True
        return moved

    def stuck(self) -> list[str]:
        """Ranks that did not end, and sends that are never received."""
        waiting = [
            f"rank {rank}: waits forever in {', '.join(map(str, self.made[rank][at]))}"
            for rank, at in enumerate(self.at)
            if at < len(self.made[rank])
        ]
        unread = [
            f"rank {a} to {b}: {action} is never received"
            for (a, b, way), sent in self.sent.items()
            for action in sent[len(self.received[a, b, way]) :]
        ]
        return waiting + (unread if not waiting else [])

    def _side(self, sends: bool) -> dict[tuple[int, int, int], list[Action]]:
        return self.sent if sends else self.received

    def _issue(self, rank: int, action: Action) -> list[tuple[tuple[int, int, int], bool, int]]:
        """Compute, or post a message; returns which place of which side of a channel must be filled before going on."""
        if action.kind.computes:
            self.breaches += [f"rank {rank}: {action} before {need}" for need in self._needs(action) - self.done]
            self.done.add(action)
            return []
        sends, other = _is_send(action), peer(self.pipeline, action)
        way = int(action.kind in (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)) if self.channels == 2 else 0
        channel = (rank, other, way) if sends else (other, rank, way)
        self.sent.setdefault(channel, [])
        self.received.setdefault(channel, [])
        side, far = self._side(sends)[channel], self._side(not sends)[channel]
        index = len(side)
        side.append(action)
        if sends:
            made = action._replace(kind=Kind.F if action.kind is Kind.SEND_FORWARD else Kind.B)
            self.breaches += [f"rank {rank}: {action} before {made}"] * (made not in self.done)
        if index < len(far) and counterpart(self.pipeline, action) != far[index]:
            self.breaches.append(f"rank {rank}: {action} meets {far[index]} of rank {other}")
        return [] if sends and self.sends is Sends.BUFFERED else [(channel, not sends, index)]

    def _needs(self, action: Action) -> set[Action]:
        """Actions due before a computation, with those of other ranks replaced by their receive."""
        received = action._replace(kind=Kind.RECV_FORWARD if action.kind is Kind.F else Kind.RECV_BACKWARD)
        own = self.pipeline.rank(action.stage)
        return {need if self.pipeline.rank(need.stage) == own else received for need in self.pipeline.needs(action)}
