"""Why ranks are desynchronised, in one line with the ranks to blame: a mismatch, a skipped call, a deadlock."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shardproof.harness.engines.calls.matching import GroupCall, compare_calls, ranks_named
from shardproof.harness.engines.calls.pending import ANY, Mismatch, PendingCollective, PendingMessage, RankGroup
from shardproof.harness.engines.calls.signature import Signature, described
from shardproof.harness.errors import Position


class IssuedCall(Protocol):
    """A call that a rank has issued: the work of an in-process rank, or a call from a process's flight recorder.

    `number` counts the calls that the rank issued in the group before. `signature` is the rank's own, `event` the state
    of the call over all ranks.
    """

    rank: int
    group: RankGroup
    number: int
    signature: Signature
    event: PendingCollective | PendingMessage


class RootCause(NamedTuple):
    """The root cause in one line, the ranks to blame; `kind`: of a Desynchronised, postmortem.UNSERVED, else ""."""

    text: str
    ranks: tuple[int, ...]
    kind: str = ""


def position_in_call(call: IssuedCall, state: str, caller: str, stack: tuple[str, ...] = ()) -> Position:
    """The position of a rank in a call, or after it."""
    return Position(
        rank=call.rank,
        state=state,
        op=call.signature.op,
        number=call.number,
        group=call.group.label,
        detail=_detail(call),
        caller=caller,
        stack=stack,
    )


def call_text(call: IssuedCall) -> str:
    """A call in messages: "all_reduce #3 of tp (0 1)"."""
    return f"{call.signature.op} #{call.number} of {call.group.label}"


def of_mismatch(mismatch: Mismatch) -> RootCause:
    """The argument in which ranks disagree, with its value on every rank."""
    group, collective = mismatch.group, mismatch.collective
    if collective is None or mismatch.words:
        call = f"{mismatch.signature.op} #{mismatch.number} of {mismatch.group.label}"
        return RootCause(f"ranks disagree in {call}: {mismatch.words}", mismatch.ranks, "mismatch")
    calls = {
        rank: GroupCall(collective.differing.get(member, collective.signature))
        for member, rank in enumerate(group.ranks)
        if collective.issued[member] is not None
    }
    found = compare_calls((group.name, group.ranks, ""), mismatch.number, calls, group.label)
    assert found is not None, "a mismatch is two signatures that differ"
    return RootCause(found.text, found.ranks, "mismatch")


def of_deadlock(done: Sequence[bool], waiting: Sequence[IssuedCall | None]) -> RootCause:
    """No rank can go on: follow which rank waits for which, to a rank that has finished or round a circle."""
    rank = done.index(False)
    path: list[tuple[int, IssuedCall]] = []
    while rank not in [waiter for waiter, _ in path]:
        call = waiting[rank]
        if call is None:
            break
        path.append((rank, call))
        missing = _missing(call)
        rank = next((other for other in missing if done[other]), missing[0])
    if done[rank]:
        waiter, call = path[-1]
        text = f"rank {rank} has finished, but rank {waiter} waits for it in {call_text(call)}"
        return RootCause(text, (rank,), "skipped")
    start = next(i for i, (waiter, _) in enumerate(path) if waiter == rank)
    circle = path[start:]
    after = [waiter for waiter, _ in circle[1:]] + [rank]
    steps = (
        f"rank {waiter} waits for rank {other} in {call_text(call)}"
        for (waiter, call), other in zip(circle, after, strict=True)
    )
    return RootCause(f"no rank can go on: {', '.join(steps)}", tuple(waiter for waiter, _ in circle), "deadlock")


def of_skipped(groups: Sequence[RankGroup]) -> RootCause | None:
    """After every rank has finished: a call that some ranks never issued; None when there is none."""
    for group in groups:
        for number, collective in group.collectives.items():
            absent = [rank for rank, brought in zip(group.ranks, collective.issued, strict=True) if brought is None]
            call = f"{collective.signature.op} #{number} of {group.label}"
            text = f"every rank has finished, but {ranks_named(absent)} never made {call}"
            return RootCause(text, tuple(absent), "skipped")
        for message in group.messages:
            peer = "any rank" if message.peer == ANY else f"rank {group.ranks[message.peer]}"
            what = f"rank {group.ranks[message.member]}'s {message.signature.op} in {group.label}"
            text = f"every rank has finished, but {what} was never met by {peer}"
            return RootCause(text, () if message.peer == ANY else (group.ranks[message.peer],), "skipped")
    return None


def _missing(call: IssuedCall) -> list[int]:
    """The ranks that a waiting rank waits for."""
    ranks, event = call.group.ranks, call.event
    if isinstance(event, PendingCollective):
        return [rank for rank, brought in zip(ranks, event.issued, strict=True) if brought is None]
    if event.peer != ANY:
        return [ranks[event.peer]]
    return [rank for rank in ranks if rank != call.rank]


def _detail(call: IssuedCall) -> str:
    if not isinstance(call.event, PendingMessage):
        return described(call.signature)
    peer = "any rank" if call.event.peer == ANY else f"rank {call.group.ranks[call.event.peer]}"
    tag = f" tag {call.event.tag}" if call.event.tag else ""
    return f"{described(call.signature)} {'to' if call.signature.op == 'send' else 'from'} {peer}{tag}"
