"""Python's interpreter: the first lines of a new one, garbage collection, turns of threads, Ctrl-C."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTED_AFTER = (50_000, 20, 10)
"""When Python collects garbage (gc.set_threshold). The default, after 700 new objects, costs a proof over 4 %."""
_BOOT = """import gc, sys
gc.disable()
sys.path[:] = {path!r}
"""


def boot() -> str:
    """The first lines of a program for a new interpreter, which searches modules where this process does. Garbage
    collection is off, since all that is loaded next stays.
    """
    return _BOOT.format(path=sys.path)


def open_missing_streams() -> None:
    """Open the null device in the place of standard streams that are closed: else the next file would be one of them.

    Processes that are started later inherit it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  (it stays open as the process's own)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


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

    Use it around code that reads many files: each read releases the interpreter, and waits such a turn to get it back.
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
    """A Ctrl-C in the body raises KeyboardInterrupt after the body. A SIGINT handler that is not Python's own stays."""
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
