"""Laws of any set of programs: everything computed once, nothing before its input, messages in order.

Every check takes programs, so that it can be seen to fail on a wrong one, and returns what it found, in words. Closed
forms of live chunks and of sends stand beside the counts of a program. In `timeline` messages take no time.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from shardproof.parallel.schedules import Action, Kind, Pipeline, Program, counterpart, order, peer

COMPUTED = (Kind.F, Kind.B)
"""All other kinds are messages."""
LASTS = {Kind.F: 1, Kind.B: 2}
"""Time of a micro-batch on all chunks of a rank, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When one computation runs."""

    action: Action
    start: Fraction
    end: Fraction


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
        seen = Counter(action for step in steps for action in step if action.kind in COMPUTED)
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
    """Actions before their input, swapped messages, and ranks that wait forever, when all programs run.

    Between two ranks the k-th send meets the k-th receive, as in torch.distributed. With `channels=2` activations and
    gradients go over two process groups, so that only messages of one direction are in one order. A batch is over when
    the other end of each message is issued.
    """
    one_by_one = sends is Sends.BLOCKING
    steps = [[(a,) for step in own for a in step] if one_by_one else [*own] for own in made]
    at, issued, breaches = [0] * len(made), set[Action](), list[str]()
    ends: dict[tuple[int, int, bool], tuple[list[Action], list[Action]]] = defaultdict(lambda: ([], []))

    def issue(rank: int, action: Action) -> None:
        breaches.extend(f"rank {rank}: {action} before {need}" for need in _inputs(pipeline, rank, action) - issued)
        issued.add(action)
        if action.kind not in COMPUTED:
            other, sent = peer(pipeline, action), action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
            forward = channels == 1 or action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
            ends[(rank, other, forward) if sent else (other, rank, forward)][not sent].append(action)

    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(steps):
            while at[rank] < len(own):
                for action in own[at[rank]]:
                    if action not in issued:
                        issue(rank, action)
                        moved = True
                messages = [action for action in own[at[rank]] if action.kind not in COMPUTED]
                if any(counterpart(pipeline, action) not in issued for action in messages):
                    break
                at[rank] += 1
    for (_, rank, _), (sent, received) in ends.items():
        pairs = zip(sent, received, strict=False)
        breaches += [f"rank {rank}: {b} meets {a}" for a, b in pairs if counterpart(pipeline, a) != b]
    stuck = [(rank, own[at[rank]]) for rank, own in enumerate(steps) if at[rank] < len(own)]
    return breaches + [f"rank {rank}: waits forever in {', '.join(map(str, step))}" for rank, step in stuck]


def _inputs(pipeline: Pipeline, rank: int, action: Action) -> set[Action]:
    """Actions due on a rank before one: of those of other ranks, the receive."""
    if action.kind in COMPUTED:
        received = action._replace(kind=Kind.RECV_FORWARD if action.kind is Kind.F else Kind.RECV_BACKWARD)
        return {need if pipeline.rank(need.stage) == rank else received for need in needed(pipeline, action)}
    made = {Kind.SEND_FORWARD: Kind.F, Kind.SEND_BACKWARD: Kind.B}.get(action.kind)
    return {action._replace(kind=made)} if made else set()


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
