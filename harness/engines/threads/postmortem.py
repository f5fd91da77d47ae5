"""Why a run ended badly, told from where its ranks stand: one cause, and one position a rank.

Read after the driver got the baton back and before the threads are ended, so every frame is still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from harness.callers import caller_of, issued_at, raised_at
from harness.engines.calls.pending import ANY, Fault, Group, Meeting, Post
from harness.engines.calls.signature import Signature, described, difference, field_words
from harness.engines.threads.matcher import Exchange
from harness.engines.threads.scheduler import Baton, State
from harness.errors import Position, error_text, ranks_text

__all__ = [
    "Cause",
    "Raised",
    "Waiting",
    "in_call",
    "left_open",
    "of_deadlock",
    "of_fault",
    "of_raise",
    "of_time",
    "positions",
]


class Waiting(Protocol):
    """A call in which a rank waits: the in-process engine's work, or what a process wrote down."""

    @property
    def rank(self) -> int:
        """The rank that waits."""
        ...

    @property
    def group(self) -> Group:
        """The group of the call."""
        ...

    @property
    def number(self) -> int:
        """This rank's calls in the group before it."""
        ...

    @property
    def said(self) -> Signature:
        """What the rank says in it."""
        ...

    @property
    def event(self) -> Meeting | Post:
        """Where it waits."""
        ...


class Raised(NamedTuple):
    """An exception that ended a rank's program."""

    rank: int
    error: BaseException


class Cause(NamedTuple):
    """The root cause in one line, the ranks to blame, and the `kind` of a Desynchronised, "" for other errors."""

    text: str
    ranks: tuple[int, ...]
    kind: str = ""


def positions(baton: Baton, exchange: Exchange, raised: Sequence[Raised]) -> list[Position]:
    """Where every rank stands, by rank."""
    errors = {entry.rank: entry.error for entry in raised}
    found = []
    for rank, (state, frame) in enumerate(zip(baton.states, baton.frames(), strict=True)):
        work = exchange.waiting[rank]
        if rank in errors:
            caller = raised_at(errors[rank].__traceback__)
            found.append(Position(rank=rank, state="raised", detail=error_text(errors[rank]), caller=caller))
        elif state in {State.DONE, State.NOT_STARTED}:
            found.append(Position(rank=rank, state="finished" if state is State.DONE else "not started"))
        elif work is not None and not work.event.done:
            found.append(in_call(work, "waits in", str(issued_at(frame) or "")))
        else:
            found.append(Position(rank=rank, state="runs", caller=caller_of(frame)))
    return found


def in_call(work: Waiting, state: str, caller: str, stack: tuple[str, ...] = ()) -> Position:
    """The position of a rank in a call, or after it."""
    return Position(
        rank=work.rank,
        state=state,
        op=work.said.op,
        number=work.number,
        group=work.group.label,
        detail=_said(work),
        caller=caller,
        stack=stack,
    )


def of_raise(raised: Sequence[Raised], world_size: int) -> Cause:
    """A rank raised first."""
    first = raised[0]
    place = raised_at(first.error.__traceback__)
    text = f"rank {first.rank} of {world_size} raised {error_text(first.error)}" + (f", at {place}" if place else "")
    return Cause(text, tuple(entry.rank for entry in raised))


def of_fault(fault: Fault) -> Cause:
    """Ranks that met do not agree, or one changed what was in flight."""
    if fault.kind == "race":
        return Cause(fault.words, fault.ranks, fault.kind)
    if fault.meeting is None:
        call = f"{fault.said.op} #{fault.number} of {fault.group.label}"
        return Cause(f"ranks disagree in {call}: {fault.words}", fault.ranks, "mismatch")
    said: dict[int, Signature] = {}
    for member, rank in enumerate(fault.group.ranks):
        if fault.meeting.operands[member] is not None:
            said[rank] = fault.meeting.said
        elif member in fault.meeting.parted:
            said[rank] = fault.meeting.parted[member]
    usual = max(said.values(), key=lambda one: list(said.values()).count(one))
    odd = next(one for one in said.values() if one != usual)
    field = difference(odd, usual)
    by_value: dict[str, list[int]] = {}
    for one in (odd, usual):
        by_value[field_words(field, one)[1]] = []
    for rank, one in said.items():
        by_value.setdefault(field_words(field, one)[1], []).append(rank)
    values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
    blamed = [rank for rank, one in said.items() if one != usual]
    if 2 * len(blamed) >= len(said):
        blamed = list(said)
    call = f"call #{fault.number} of {fault.group.label}"
    return Cause(f"ranks disagree in {call}: {field_words(field, odd)[0]} is {values}", tuple(blamed), "mismatch")


def of_deadlock(done: Sequence[bool], waiting: Sequence[Waiting | None]) -> Cause:
    """Nobody can go on: follow who waits for whom, to a rank that has finished or round a circle."""
    rank = done.index(False)
    path: list[tuple[int, Waiting]] = []
    while rank not in [waiter for waiter, _ in path]:
        work = waiting[rank]
        if work is None:
            break
        path.append((rank, work))
        missing = _missing(work)
        rank = next((other for other in missing if done[other]), missing[0])
    if done[rank]:
        waiter, work = path[-1]
        text = f"rank {rank} has finished, but rank {waiter} waits for it in {_call(work)}"
        return Cause(text, (rank,), "skipped")
    start = next(i for i, (waiter, _) in enumerate(path) if waiter == rank)
    circle = path[start:]
    after = [waiter for waiter, _ in circle[1:]] + [rank]
    steps = (
        f"rank {waiter} waits for rank {other} in {_call(work)}"
        for (waiter, work), other in zip(circle, after, strict=True)
    )
    return Cause(f"no rank can go on: {', '.join(steps)}", tuple(waiter for waiter, _ in circle), "deadlock")


def left_open(groups: Sequence[Group]) -> Cause | None:
    """Every rank has finished: a call that not every rank made, None when there is none."""
    for group in groups:
        for number, meeting in group.meetings.items():
            absent = [rank for rank, operands in zip(group.ranks, meeting.operands, strict=True) if operands is None]
            call = f"{meeting.said.op} #{number} of {group.label}"
            return Cause(f"every rank has finished, but {_ranks(absent)} never made {call}", tuple(absent), "skipped")
        for post in group.posts:
            peer = "any rank" if post.peer == ANY else f"rank {group.ranks[post.peer]}"
            what = f"rank {group.ranks[post.member]}'s {post.said.op} in {group.label}"
            text = f"every rank has finished, but {what} was never met by {peer}"
            return Cause(text, () if post.peer == ANY else (group.ranks[post.peer],), "skipped")
    return None


def of_time(baton: Baton, timeout_s: float) -> Cause:
    """The time limit was reached while a rank was running."""
    frames = baton.frames()
    running = [rank for rank, state in enumerate(baton.states) if state is State.RUNNING]
    places = ((rank, caller_of(frames[rank])) for rank in running)
    texts = [f"rank {rank} runs" + (f" at {place}" if place else "") for rank, place in places]
    return Cause(f"no end within {timeout_s:g} s: {', '.join(texts) or 'no rank was running'}", tuple(running))


def _missing(work: Waiting) -> list[int]:
    """The ranks that a waiting rank waits for."""
    ranks, event = work.group.ranks, work.event
    if isinstance(event, Meeting):
        return [rank for rank, operands in zip(ranks, event.operands, strict=True) if operands is None]
    if event.peer != ANY:
        return [ranks[event.peer]]
    return [rank for rank in ranks if rank != work.rank]


def _call(work: Waiting) -> str:
    return f"{work.said.op} #{work.number} of {work.group.label}"


def _said(work: Waiting) -> str:
    if not isinstance(work.event, Post):
        return described(work.said)
    peer = "any rank" if work.event.peer == ANY else f"rank {work.group.ranks[work.event.peer]}"
    tag = f" tag {work.event.tag}" if work.event.tag else ""
    return f"{described(work.said)} {'to' if work.said.op == 'send' else 'from'} {peer}{tag}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks)}"
