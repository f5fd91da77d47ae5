"""Why an in-process run ended badly, and where every rank stands.

Read after the driver has the turn back and before the threads are ended, so every frame is still there.
"""

import re
import sysconfig
import time
from collections.abc import Sequence
from typing import NamedTuple

from shardproof.harness.engines.calls.callers import caller_of, is_user, issued_at, place_raised, what_led_to
from shardproof.harness.engines.calls.pending import RootCause, position_in_call
from shardproof.harness.engines.threads.matcher import CollectiveMatcher
from shardproof.harness.engines.threads.rank_threads import Stillness
from shardproof.harness.engines.threads.scheduler import RankStatus, Scheduler
from shardproof.harness.errors import Position, error_text

_BLOCKED = (
    "; where ranks are threads of one process, a lock or a queue that waits for another rank may wait for ever; "
    "legal: --engine pool"
)
UNSERVED = "unserved"
"""The kind of a root cause that is no fault of the program: the engine cannot run it."""
_LOOKS = 30
"""Looks at a running rank: more than a Stillness needs to report a blocked thread."""


class Raised(NamedTuple):
    """An exception that ended a rank's program."""

    rank: int
    error: BaseException


def positions(scheduler: Scheduler, matcher: CollectiveMatcher, raised: Sequence[Raised]) -> list[Position]:
    """Where every rank stands, by rank."""
    errors = {entry.rank: entry.error for entry in raised}
    places = []
    for rank, (status, frame) in enumerate(zip(scheduler.statuses, scheduler.frames(), strict=True)):
        work = matcher.waiting[rank]
        if rank in errors:
            caller = place_raised(errors[rank].__traceback__)
            places.append(Position(rank=rank, state="raised", detail=error_text(errors[rank]), caller=caller))
        elif status in {RankStatus.DONE, RankStatus.NOT_STARTED}:
            places.append(Position(rank=rank, state="finished" if status is RankStatus.DONE else "not started"))
        elif work is not None and not work.event.done:
            places.append(position_in_call(work, "waits in", str(issued_at(frame) or "")))
        else:
            places.append(Position(rank=rank, state="runs", caller=caller_of(frame)))
    return places


def of_raise(raised: Sequence[Raised], world_size: int) -> RootCause:
    """A rank raised first."""
    first = raised[0]
    place = place_raised(first.error.__traceback__)
    text = f"rank {first.rank} of {world_size} raised {error_text(first.error)}" + (f", at {place}" if place else "")
    text += what_led_to(first.error)
    return RootCause(text, tuple(entry.rank for entry in raised))


def alike(raised: Sequence[Raised], world_size: int) -> bool:
    """Whether all ranks raised one exception at one line: none of them left behind what the others raised about."""
    places = {(type(entry.error), place_raised(entry.error.__traceback__)) for entry in raised}
    return len(raised) == world_size and len(places) == 1


def of_time(scheduler: Scheduler, timeout_s: float) -> RootCause:
    """The time limit was reached while a rank was running."""
    frames = scheduler.frames()
    running = [rank for rank, status in enumerate(scheduler.statuses) if status is RankStatus.RUNNING]
    looks = {rank: Stillness(scheduler.idents[rank], strictly=True) for rank in running}
    blocked: set[int] = set()
    for _ in range(_LOOKS):
        blocked = {rank for rank, look in looks.items() if look()}
        time.sleep(0.001)
    texts = []
    for rank in running:
        place, does = caller_of(frames[rank]), "is blocked" if rank in blocked else "runs"
        texts.append(f"rank {rank} {does}" + (f" at {place}" if place else ""))
    text = f"no end within {timeout_s:g} s: {', '.join(texts) or 'no rank was running'}"
    return RootCause(text + (_BLOCKED if blocked else ""), tuple(running))


def of_guests(scheduler: Scheduler) -> RootCause:
    """No rank can go on, and threads that ranks started want to call for them."""
    texts = [f"rank {rank} calls {why}" for rank, why in sorted(scheduler.guests.items())]
    rule = "while its own thread waits in another call, and the threads of a rank call one at a time here"
    return RootCause(f"{', '.join(texts)} {rule}; legal: --engine pool", tuple(sorted(scheduler.guests)), UNSERVED)


_ALREADY = re.compile(r"already|\btwice\b|more than once|only once", re.IGNORECASE)
"""Words of an exception about state that was not expected: another rank has left it there."""
_NO_CUDA = re.compile(r"not compiled with CUDA|No CUDA GPUs|NVIDIA driver|CUDA support|a CUDA build|'_cuda_\w+'")
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))


def hint(error: BaseException, *, others_ran: bool, per_rank: Sequence[str]) -> str:
    """A clause for the message of an exception that a rank raised, "" where nothing is known.

    `others_ran`: other ranks had run before, and may have left state behind. `per_rank`: modules whose state each rank
    has for itself.
    """
    text = error_text(error)
    if _NO_CUDA.search(text):
        return "; on a machine without CUDA, legal: subject.session = shardproof.cuda_on_cpu"
    module, file = _raised_in(error)
    if not others_ran or not (_ALREADY.search(text) or file.startswith(_INSTALLED)):
        return ""
    legal = "" if module in per_rank else f"; legal: subject.per_rank = {(*per_rank, module)!r}"
    return f"; if --engine pool passes, ranks share state here because they are threads{legal}"


def _raised_in(error: BaseException) -> tuple[str, str]:
    """The module and the file of the innermost line outside torch."""
    module, file, traceback = "", "", error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if is_user(name):
            module, file = str(traceback.tb_frame.f_globals.get("__name__", "")), name
        traceback = traceback.tb_next
    return module, file
