"""Laws of any set of programs: everything computed once, nothing before its input, messages in order.

Every check takes programs, so that it can be seen to fail on a wrong one, and returns what it found, in words. Closed
forms of live chunks and of sends stand beside the counts of a program. In `timeline` messages take no time.

Pipelines to check are every small one, and drawn larger ones; `broken` are all checks of one, by name.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import product

from hypothesis import strategies as st

from shardproof.parallel.communication.schedules import (
    Action,
    Kind,
    Pipeline,
    Program,
    bubble_closed_form,
    counterpart,
    groups_between,
    order,
    peer,
)

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


SCHEDULES = ("gpipe", "1f1b", "interleaved")


def every(schedule: str, pp: int, micro: int) -> Iterator[Pipeline]:
    """Every legal pipeline of a schedule up to these sizes, with 2 or 3 chunks and all groups where it has them."""
    for ranks, batches in product(range(1, pp + 1), range(1, micro + 1)):
        if schedule == "interleaved":
            for chunks, group in product((2, 3), range(ranks, batches + 1)):
                if ranks > 1 and not 0 < batches % group < ranks:
                    yield Pipeline(schedule=schedule, ranks=ranks, micro=batches, chunks=chunks, group=group)
        else:
            yield Pipeline(schedule=schedule, ranks=ranks, micro=batches)


@st.composite
def larger(draw: st.DrawFn) -> Pipeline:
    """A pipeline of up to 12 ranks, with fewer and with more micro-batches than ranks, whole and broken groups."""
    schedule, pp = draw(st.sampled_from(SCHEDULES)), draw(st.integers(2, 12))
    if schedule != "interleaved":
        return Pipeline(schedule=schedule, ranks=pp, micro=draw(st.integers(1, 40)))
    group = draw(st.integers(pp, pp + 4))
    rest = draw(st.sampled_from([0, *range(pp, group)]))
    micro = group * draw(st.integers(1, 3)) + rest
    return Pipeline(schedule=schedule, ranks=pp, micro=micro, chunks=draw(st.integers(2, 4)), group=group)


def broken(pipeline: Pipeline, made: Sequence[Program]) -> dict[str, object]:
    """The checks that programs do not pass, with what each found."""
    try:
        computed = [[action for step in steps for action in step if action.kind in COMPUTED] for steps in made]
        simulated = bubble(timeline(pipeline, computed))
        stated = bubble_closed_form(pipeline)
        slow = [f"bubble {simulated}, closed form {stated}"] if stated is not None and simulated != stated else []
    except ValueError as forever:
        slow = [str(forever)]
    ranks = range(pipeline.ranks)
    lives = [(live(made[rank]), live_stated(pipeline, rank)) for rank in ranks]
    counts = [Counter(action.kind for step in steps for action in step) for steps in made]
    sends = [(count[Kind.SEND_FORWARD], count[Kind.SEND_BACKWARD]) for count in counts]
    found: dict[str, list[object]] = {
        "complete": [*check_complete(pipeline, made)],
        "legal": [*check_legal(pipeline, made, Sends.BATCHED, groups_between(pipeline))],
        "live": [pair for pair in lives if pair[0] != pair[1]],
        "sends": [rank for rank in ranks if sends[rank] != sends_stated(pipeline, rank)],
        "time": [*slow],
    }
    return {name: breaches for name, breaches in found.items() if breaches}
