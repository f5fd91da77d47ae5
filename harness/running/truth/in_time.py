"""A time limit for what is computed in this thread: the dense model, its control runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from harness.engines.calls.callers import is_user, shortened
from harness.errors import TimeLimit

_LATE_S = 0.5
"""How much later than its limit a body is interrupted, so that an engine in it ends first, which can say more."""
_AGAIN_S = 1.0
"""How long after an interruption that the body has caught it comes again."""


@contextmanager
def in_time(limit_s: float, what: str) -> Iterator[None]:
    """Raise TimeLimit in a body that takes longer; `what` says in words what is computed.

    Code that never comes back from a native function is not reached, nor is a body outside of the main thread, nor one
    of a program with an alarm of its own.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not hasattr(signal, "setitimer") or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return

    def late(_number: int, frame: FrameType | None) -> None:
        told = f"time limit of {limit_s:g} s: {what} is at work{_place(frame)}; legal: a larger --timeout"
        raise TimeLimit(told, ranks=(), positions=())

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s + _LATE_S, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _place(frame: FrameType | None) -> str:
    """The innermost line of the user's code: " at model.py:7 in forward"."""
    while frame and not is_user(frame.f_code.co_filename):
        frame = frame.f_back
    return f" at {shortened(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""
