"""Starts a new interpreter for a module of ours, which searches modules where this process does."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTED_AFTER = (50_000, 20, 10)
"""The number of new objects after which Python collects garbage (gc.set_threshold): 700, the default, costs a proof
over 4 %.
"""
_BOOT = """import gc, sys
gc.disable()
sys.path[:] = {path!r}
"""


def boot() -> str:
    """The first lines of a program for a new interpreter. Garbage collection is off, since all that is loaded next
    stays.
    """
    return _BOOT.format(path=sys.path)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside, no garbage is collected: what is made here stays, and collecting takes a tenth of an import's time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def turns_of_threads(seconds: float) -> Iterator[None]:
    """Inside, threads that compute release the interpreter after this time, not after 5 ms.

    It is for a thread that reads many files: each reading releases the interpreter, and gets it back after such a turn.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """A SIGTERM in the body is a Ctrl-C, unless something else handles it. Processes forked there end by it."""
    main, owner = threading.current_thread() is threading.main_thread(), os.getpid()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, _frame: object) -> None:
        if os.getpid() == owner:
            signal.raise_signal(signal.SIGINT)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def interrupted_after() -> Iterator[None]:
    """A Ctrl-C in the body raises KeyboardInterrupt after it. A SIGINT handler that is not Python's own stays."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
