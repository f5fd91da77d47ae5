"""Why an in-process run ended badly, and where every rank stands.

Read after the driver has the turn back and before the threads are ended, so every frame is still there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.callers import caller_of, issued_at, raised_at
from harness.engines.calls.desync import RootCause, position_in_call
from harness.engines.threads.matcher import CollectiveMatcher
from harness.engines.threads.scheduler import RankStatus, Scheduler
from harness.errors import Position, error_text

__all__ = ["Raised", "of_raise", "of_time", "positions"]


class Raised(NamedTuple):
    """An exception that ended a rank's program."""

    rank: int
    error: BaseException


def positions(scheduler: Scheduler, matcher: CollectiveMatcher, raised: Sequence[Raised]) -> list[Position]:
    """Where every rank stands, by rank."""
    errors = {entry.rank: entry.error for entry in raised}
    found = []
    for rank, (status, frame) in enumerate(zip(scheduler.statuses, scheduler.frames(), strict=True)):
        work = matcher.waiting[rank]
        if rank in errors:
            caller = raised_at(errors[rank].__traceback__)
            found.append(Position(rank=rank, state="raised", detail=error_text(errors[rank]), caller=caller))
        elif status in {RankStatus.DONE, RankStatus.NOT_STARTED}:
            found.append(Position(rank=rank, state="finished" if status is RankStatus.DONE else "not started"))
        elif work is not None and not work.event.done:
            found.append(position_in_call(work, "waits in", str(issued_at(frame) or "")))
        else:
            found.append(Position(rank=rank, state="runs", caller=caller_of(frame)))
    return found


def of_raise(raised: Sequence[Raised], world_size: int) -> RootCause:
    """A rank raised first."""
    first = raised[0]
    place = raised_at(first.error.__traceback__)
    text = f"rank {first.rank} of {world_size} raised {error_text(first.error)}" + (f", at {place}" if place else "")
    return RootCause(text, tuple(entry.rank for entry in raised))


def of_time(scheduler: Scheduler, timeout_s: float) -> RootCause:
    """The time limit was reached while a rank was running."""
    frames = scheduler.frames()
    running = [rank for rank, status in enumerate(scheduler.statuses) if status is RankStatus.RUNNING]
    places = ((rank, caller_of(frames[rank])) for rank in running)
    texts = [f"rank {rank} runs" + (f" at {place}" if place else "") for rank, place in places]
    return RootCause(f"no end within {timeout_s:g} s: {', '.join(texts) or 'no rank was running'}", tuple(running))
