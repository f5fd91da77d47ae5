"""Threads that a rank starts, and what it gives to an executor's threads: they are in the world of the rank.

They are daemons, and no executor of theirs is waited for when the process ends, so that one which is blocked for good
does not keep it. When a run fails, those that still run Python code are ended.
"""

from __future__ import annotations

import concurrent.futures.thread as executors
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

from harness.engines.threads.rank_threads import Aborted, interrupt
from harness.torch_internals.world import in_world_of, not_waited_for, rank_tables

_LOOKS = 20
"""Looks, a millisecond or more apart, at which a thread must be at the same place to stand still."""
_TASK = Path("/proc/self/task")
_WAITS_IN = (threading.__file__, executors.__file__)


@contextmanager
def followed(left: Callable[[Any], None]) -> Iterator[None]:
    """Within it, threads that ranks start are in their worlds; `left(tables)` is called in each when it is done."""
    start, submit, started = threading.Thread.start, ThreadPoolExecutor.submit, list[threading.Thread]()

    def start_of_rank(thread: threading.Thread) -> None:
        tables = rank_tables()
        if tables is not None and not thread.ident:
            thread.daemon = True
            run, context = thread.run, copy_context()

            def as_rank() -> None:
                vars(thread).pop("run")  # it refers to the thread
                with suppress(Aborted):
                    context.run(_as_rank, tables, left, run)

            vars(thread)["run"] = as_rank
            started.append(thread)
        start(thread)

    def submit_of_rank(executor: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **words: Any) -> Any:
        tables = rank_tables()
        if tables is not None:
            fn = functools.partial(copy_context().run, _as_rank, tables, left, fn)
        return submit(executor, fn, *args, **words)

    threading.Thread.start = start_of_rank  # type: ignore[assignment, method-assign]
    ThreadPoolExecutor.submit = submit_of_rank  # type: ignore[assignment, method-assign]
    try:
        yield
    except BaseException:
        for thread in started:
            interrupt(thread)
        raise
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
        for thread in started:
            if thread.is_alive():
                not_waited_for(thread)


def _as_rank(tables: Any, left: Callable[[Any], None], function: Callable[..., Any], *args: Any, **words: Any) -> Any:
    with in_world_of(tables):
        try:
            return function(*args, **words)
        finally:
            left(tables)


class Stillness:
    """Looks at one thread again and again: whether it is blocked (a lock, a queue, a sleep) or has ended.

    `strictly`: not even awake in between, as it is who sleeps again and again. That is known on Linux alone.
    """

    def __init__(self, ident: int, *, strictly: bool = False) -> None:
        self._ident, self._strictly = ident, strictly
        self._native = next((thread.native_id for thread in threading.enumerate() if thread.ident == ident), None)
        self._seen: tuple[object, ...] = ()
        self._times = 0

    def __call__(self) -> bool:
        """Whether the thread was at one place, asleep, at the last looks."""
        frame = sys._current_frames().get(self._ident)
        if frame is None:
            return True
        now = (id(frame), frame.f_lasti, self._read("schedstat") if self._strictly else b"")
        self._times = self._times + 1 if now == self._seen and self._sleeps(frame.f_code.co_filename) else 0
        self._seen = now
        return self._times >= _LOOKS

    def _sleeps(self, file: str) -> bool:
        """By Linux; elsewhere only code of Python that waits for threads is known to sleep."""
        state = self._read("stat").rpartition(b")")[2].split()
        return state[0] != b"R" if state else file in _WAITS_IN

    def _read(self, name: str) -> bytes:
        """A file of the system on this thread, empty where there is none."""
        try:
            return (_TASK / str(self._native) / name).read_bytes()
        except OSError:
            return b""
