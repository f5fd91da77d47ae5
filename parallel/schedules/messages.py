"""The program of a rank: its computations with the messages between them, in the batches in which they are issued.

A step of a program is one computation, or one batch of messages that are issued together and waited for together.
Two forms, both Megatron-Core 0.16.1's (`schedules.py`, `p2p_communication.py`; around.md 13.1, 13.2, 13.4):

plain        a receive comes just before the computation that needs it, a send just after the one that made it; a send
             and the receive from the same neighbour behind it are one batch, once the warm-up is over
interleaved  one batch at the end of every iteration (a forward, a forward and a backward, or a backward), in the
             order send_prev, recv_prev, send_next, recv_next; the first rank receives activations, and the last rank
             gradients, of an earlier chunk, which its neighbour sends before they are needed
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from shardproof.parallel.schedules.pipeline import Action, Kind, Pipeline, backward_table, forward_table, order, warm_up

Program = tuple[tuple[Action, ...], ...]
"""Steps in order; each step's actions are issued together."""

_DOWN = {Kind.SEND_FORWARD: 1, Kind.RECV_BACKWARD: 1, Kind.RECV_FORWARD: -1, Kind.SEND_BACKWARD: -1}
"""Message -> how far the other end's virtual stage is."""
_OTHER = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}
_JOINED = ((Kind.SEND_FORWARD, Kind.RECV_BACKWARD), (Kind.SEND_BACKWARD, Kind.RECV_FORWARD))
_IN_A_BATCH = (Kind.SEND_BACKWARD, Kind.RECV_FORWARD, Kind.SEND_FORWARD, Kind.RECV_BACKWARD)


def counterpart(pipeline: Pipeline, message: Action) -> Action:
    """The other end of a message: the receive of a send, the send of a receive."""
    return pipeline.at(_OTHER[message.kind], message.micro, message.stage + _DOWN[message.kind])


def peer(pipeline: Pipeline, message: Action) -> int:
    """The rank at the other end of a message."""
    return pipeline.rank(message.stage + _DOWN[message.kind])


def program(pipeline: Pipeline, rank: int) -> Program:
    """The program of a rank in one step of training."""
    made = order(pipeline, rank)
    if pipeline.schedule == "interleaved":
        return _by_iteration(pipeline, rank, made)
    return _plain(pipeline, made, warm_up(pipeline, rank))


def programs(pipeline: Pipeline) -> tuple[Program, ...]:
    """The programs of all ranks."""
    return tuple(program(pipeline, rank) for rank in range(pipeline.ranks))


def groups_between(pipeline: Pipeline) -> int:
    """The process groups between two ranks: two where one would swap the messages of both ways.

    Interleaved on two ranks: activations and gradients pass both ways between the same two ranks in one batch
    (around.md 13.4).
    """
    return 2 if pipeline.schedule == "interleaved" and pipeline.ranks == 2 else 1


def _message(pipeline: Pipeline, kind: Kind, action: Action) -> tuple[Action, ...]:
    """The message of a computation, or nothing at either end of the model and between two stages of one rank."""
    other = action.stage + _DOWN[kind]
    if not 0 <= other < pipeline.virtual_stages or pipeline.rank(other) == pipeline.rank(action.stage):
        return ()
    return (action._replace(kind=kind),)


def _plain(pipeline: Pipeline, made: Sequence[Action], warm: int) -> Program:
    steps: list[tuple[Action, ...]] = []
    forwards = 0
    for action in made:
        forward = action.kind is Kind.F
        forwards += forward
        for message in _message(pipeline, Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD, action):
            before = steps[-1] if steps else ()
            same = forwards > warm and len(before) == 1 and (before[0].kind, message.kind) in _JOINED
            if same and peer(pipeline, before[0]) == peer(pipeline, message):
                steps[-1] = (*before, message)
            else:
                steps.append((message,))
        steps.append((action,))
        sent = _message(pipeline, Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, action)
        steps += [sent] * bool(sent)
    return tuple(steps)


def _by_iteration(pipeline: Pipeline, rank: int, made: Sequence[Action]) -> Program:
    warm, total = warm_up(pipeline, rank), len(made) // 2
    forwards = [action for action in made if action.kind is Kind.F]
    backwards = [action for action in made if action.kind is Kind.B]
    activations = dict(_due(pipeline, Kind.RECV_FORWARD, forwards, forward_table(pipeline)))
    gradients = dict(_due(pipeline, Kind.RECV_BACKWARD, backwards, backward_table(pipeline)))
    steps: list[tuple[Action, ...]] = [activations.get(-1, ())]
    for iteration in range(total + warm):
        batch: list[Action] = []
        if iteration < total:
            steps.append((forwards[iteration],))
            batch += _message(pipeline, Kind.SEND_FORWARD, forwards[iteration])
            batch += activations.get(iteration, ())
        if iteration >= warm:
            steps.append((backwards[iteration - warm],))
            batch += _message(pipeline, Kind.SEND_BACKWARD, backwards[iteration - warm])
        received = gradients.get(iteration - warm, ())
        alone = iteration == warm - 1 == total - 1  # without a steady phase the first gradient is a batch of its own
        steps.append(
            tuple(sorted([*batch, *received * (not alone)], key=lambda message: _IN_A_BATCH.index(message.kind)))
        )
        steps.append(received * alone)
    return tuple(filter(None, steps))


def _due(
    pipeline: Pipeline, kind: Kind, needing: Sequence[Action], table: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """After which forward (or backward) of this rank what is received; -1 is before the first.

    A neighbour runs one iteration ahead, so what it sends is received one iteration before it is needed. Round the
    loop it was sent up to a group earlier: pp-1 iterations after the sender's own.
    """
    place = {where: index for index, where in enumerate(table)}
    due: defaultdict[int, tuple[Action, ...]] = defaultdict(tuple)
    for index, action in enumerate(needing):
        for message in _message(pipeline, kind, action):
            other = counterpart(pipeline, message)
            sent = place[other.chunk, other.micro]
            due[sent + pipeline.ranks - 1 if other.chunk != action.chunk else index - 1] += (message,)
    yield from due.items()
