"""Laws of any set of programs: everything computed once, nothing before its input, messages in order.

Every check takes programs, so that it can be seen to fail on a wrong one, and returns what it found, in words. Closed
forms of live chunks and of sends stand beside the counts of a program. In `timeline` messages take no time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from fractions import Fraction

from parallel.schedules.messages import Program, counterpart, peer
from parallel.schedules.pipeline import Action, Kind, Pipeline, order
from parallel.schedules.timing import Span

LASTS = {Kind.F: 1, Kind.B: 2}
"""Time of a micro-batch on all chunks of a rank, by kind."""


class Sends(StrEnum):
    """How sends complete: as one batch with their neighbours, or one by one when the receive is there."""

    BATCHED = "batched"
    BLOCKING = "blocking"


def orders(pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
    """The computations of all ranks."""
    return tuple(order(pipeline, rank) for rank in range(pipeline.ranks))


def needed(pipeline: Pipeline, action: Action) -> list[Action]:
    """The computations that must be done before one: of the stage before it or behind it, and its own stage's."""
    kind, micro, _, stage = action
    needs = [] if kind is Kind.F else [action._replace(kind=Kind.F)]
    other = stage - 1 if kind is Kind.F else stage + 1
    return needs + [pipeline.at(kind, micro, other)] * (0 <= other < pipeline.virtual_stages)


def check_complete(pipeline: Pipeline, made: Sequence[Program]) -> list[str]:
    """Every micro-batch passes every virtual stage exactly once, forward and backward, on the stage's rank."""
    breaches: list[str] = []
    for rank, steps in enumerate(made):
        seen = Counter(action for step in steps for action in step if action.kind.computes)
        due = Counter(
            pipeline.action(kind, rank, chunk, micro)
            for kind in (Kind.F, Kind.B)
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


def live(made: Program) -> int:
    """The most forwards of which the rank keeps activations at once, until their backward, in chunks."""
    now = most = 0
    for action in (action for step in made for action in step):
        now += (action.kind is Kind.F) - (action.kind is Kind.B)
        most = max(most, now)
    return most


def live_stated(pipeline: Pipeline, rank: int) -> int:
    """Closed form of `live`, in chunks; a chunk is 1/chunks of a rank's layers."""
    pp, micro, chunks = pipeline.ranks, pipeline.micro, pipeline.chunks
    match pipeline.schedule:
        case "gpipe":
            return micro
        case "interleaved":
            warm = 2 * (pp - 1 - rank) + (chunks - 1) * pipeline.in_a_row
            return min(warm + 1, micro * chunks)
        case _:
            return min(pp - rank, micro)


def sends_stated(pipeline: Pipeline, rank: int) -> tuple[int, int]:
    """Closed form: sends of (activations, gradients) of a rank in one step of training."""
    pp, micro, chunks = pipeline.ranks, pipeline.micro, pipeline.chunks
    if pp == 1:
        return 0, 0
    first, last = int(rank == 0), int(rank == pp - 1)
    return micro * (chunks - last), micro * (chunks - first)


def timeline(
    pipeline: Pipeline, made: Sequence[Sequence[Action]], lasts: Mapping[Kind, int] = LASTS
) -> tuple[tuple[Span, ...], ...]:
    """Spans of all ranks when each computation of `made` starts as soon as its rank and its inputs allow.

    `lasts`: the time of a micro-batch on all chunks of a rank, by kind.
    Raises ValueError when the orders wait for each other forever.
    """
    ends: dict[Action, Fraction] = {}
    spans: list[list[Span]] = [[] for _ in made]
    moved = True
    while moved:
        moved = False
        for own, actions in zip(spans, made, strict=True):
            while len(own) < len(actions):
                action = actions[len(own)]
                needs = needed(pipeline, action)
                if any(need not in ends for need in needs):
                    break
                start = max([own[-1].end if own else Fraction(0), *(ends[need] for need in needs)])
                own.append(Span(action=action, start=start, end=start + Fraction(lasts[action.kind], pipeline.chunks)))
                ends[action] = own[-1].end
                moved = True
    for rank, (own, actions) in enumerate(zip(spans, made, strict=True)):
        if len(own) < len(actions):
            raise ValueError(f"order of rank {rank}: waits forever for the input of {actions[len(own)]}")
    return tuple(map(tuple, spans))


def bubble(spans: Sequence[Sequence[Span]]) -> Fraction:
    """The part of all ranks' time, from the first start to the last end, in which they compute nothing."""
    whole = len(spans) * max(own[-1].end for own in spans)
    return 1 - sum((span.end - span.start for own in spans for span in own), Fraction(0)) / whole


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
        return [(channel, not sends, index)]

    def _needs(self, action: Action) -> set[Action]:
        """Actions due before a computation, with those of other ranks replaced by their receive."""
        received = action._replace(kind=Kind.RECV_FORWARD if action.kind is Kind.F else Kind.RECV_BACKWARD)
        own = self.pipeline.rank(action.stage)
        return {need if self.pipeline.rank(need.stage) == own else received for need in needed(self.pipeline, action)}
