"""A fresh interpreter for a module of ours: it looks for modules where this process does, for ours where they lie.

`shardproof.rooms` keeps packages apart that have the names of our folders.
"""

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

COLLECTED_AFTER = (50_000, 20, 10)
"""New objects after which Python looks for garbage (gc.set_threshold): the default of 700 costs a proof over 4 %."""
_HOME = str(Path(__file__).resolve().parents[1])
_BOOT = """import gc, sys
gc.disable()
sys.path[:] = [*filter(None, sys.path), {home!r}]
from shardproof.rooms import lead
lead()
sys.path[:] = {path!r}
"""


def boot() -> str:
    """First lines of a program for a fresh interpreter. Garbage collection is off: what is loaded next all stays."""
    return _BOOT.format(home=_HOME, path=sys.path)


def spawned(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as the target of a process that multiprocessing spawns."""
    found: Callable[..., Any] = import_module("shardproof.child").Target(function.__module__, function.__qualname__)
    return found


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
