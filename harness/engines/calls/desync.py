"""Why ranks are desynchronised, in one line with the ranks to blame: a mismatch, a skipped call, a deadlock."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shardproof.harness.engines.calls.pending import ANY, Mismatch, PendingCollective, PendingMessage, RankGroup
from shardproof.harness.engines.calls.signature import Signature, described, difference, field_text
from shardproof.harness.errors import Position, ranks_text


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
    """The first field in which the signatures of a call differ, with its value on every rank; or the sizes."""
    if mismatch.collective is None:
        call = f"{mismatch.signature.op} #{mismatch.number} of {mismatch.group.label}"
        return RootCause(f"ranks disagree in {call}: {mismatch.words}", mismatch.ranks, "mismatch")
    signatures: dict[int, Signature] = {}
    for member, rank in enumerate(mismatch.group.ranks):
        if mismatch.collective.operands[member] is not None:
            signatures[rank] = mismatch.collective.signature
        elif member in mismatch.collective.differing:
            signatures[rank] = mismatch.collective.differing[member]
    usual = max(signatures.values(), key=lambda one: list(signatures.values()).count(one))
    odd = next(one for one in signatures.values() if one != usual)
    field = difference(odd, usual)
    by_value: dict[str, list[int]] = {field_text(field, one): [] for one in (odd, usual)}
    for rank, one in signatures.items():
        by_value.setdefault(field_text(field, one), []).append(rank)
    values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
    blamed = [rank for rank, one in signatures.items() if one != usual]
    if 2 * len(blamed) >= len(signatures):
        blamed = list(signatures)
    call, name = f"call #{mismatch.number} of {mismatch.group.label}", field.removesuffix("s").replace("_", " ")
    text = f"ranks disagree in {call}: the {name} is {values}"
    return RootCause(text, tuple(blamed), "mismatch")


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
            absent = [rank for rank, operands in zip(group.ranks, collective.operands, strict=True) if operands is None]
            call = f"{collective.signature.op} #{number} of {group.label}"
            text = f"every rank has finished, but {_ranks(absent)} never made {call}"
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
        return [rank for rank, operands in zip(ranks, event.operands, strict=True) if operands is None]
    if event.peer != ANY:
        return [ranks[event.peer]]
    return [rank for rank in ranks if rank != call.rank]


def _detail(call: IssuedCall) -> str:
    if not isinstance(call.event, PendingMessage):
        return described(call.signature)
    peer = "any rank" if call.event.peer == ANY else f"rank {call.group.ranks[call.event.peer]}"
    tag = f" tag {call.event.tag}" if call.event.tag else ""
    return f"{described(call.signature)} {'to' if call.signature.op == 'send' else 'from'} {peer}{tag}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"
