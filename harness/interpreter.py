"""A fresh interpreter for a module of ours, which looks for modules where this process does."""

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTED_AFTER = (50_000, 20, 10)
"""New objects after which Python looks for garbage (gc.set_threshold): the default of 700 costs a proof over 4 %."""
_BOOT = """import gc, sys
gc.disable()
sys.path[:] = {path!r}
"""


def boot() -> str:
    """First lines of a program for a fresh interpreter. Garbage collection is off: what is loaded next all stays."""
    return _BOOT.format(path=sys.path)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """No garbage is looked for in what is made here: it all stays, and looking takes a tenth of an import's time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def turns_of_threads(seconds: float) -> Iterator[None]:
    """Threads that compute give the interpreter away after this time, not after 5 ms: for one that reads many files.

    Each reading gives the interpreter away, and gets it back after such a turn.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def interrupted_after() -> Iterator[None]:
    """A Ctrl-C in the body raises KeyboardInterrupt after it. Another handler of SIGINT than Python's own stays."""
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
