"""Threads for ranks, used again only if the program before left nothing in them, and threads that ranks start.

torch and user code keep caches and switches per thread: meshes, DTensor's sharding decisions, grad mode, autocast. A
new thread for every rank would be the simple way to start clean, but costs time. So a thread is used again if its
Python thread-locals and torch's switches are exactly as at its birth; else it is thrown away. Where Python hides its
thread-locals, every thread is new.

A thread that a rank starts is in the world of the rank, and so are tasks that it gives to an executor's threads. These
threads are daemons, and at its end the process does not wait for their executors either, so a thread that is blocked
for good does not keep the process alive. When a run fails, those that still run Python code are ended.

Rank threads share one arena of the C library's allocator, so that memory that one rank has freed is warm for the next.
The setting holds for all threads born later in this process. They lose only speed, and only if many allocate at a time.
But cases of many shapes leave holes in such an arena: a process that proves thousands of them would keep a gigabyte, of
which a third is in use. So freed memory is returned between runs. Both are features of glibc; elsewhere nothing is
done. Sizes are bytes.
"""

import concurrent.futures.thread as executors
import contextvars
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

from shardproof.harness.engines.rank_environment import use_one_thread
from shardproof.harness.torch_internals.dispatch import thread_switches
from shardproof.harness.torch_internals.world import in_world_of, not_waited_for, rank_tables

_C = ctypes.CDLL(None)
_M_ARENA_MAX = -8
"""mallopt's word in malloc.h."""
_SLACK_BYTES = 2**28
"""How much memory may be kept for reuse, so that runs do not return and fetch again what each of them needs."""
_EVERY = 16
"""The memory is looked at once in this many runs."""
_STATM = Path("/proc/self/statm")


class Heap:
    """The memory of this process, read once in several runs, since a system call between two small
    runs is noticeable.
    """

    def __init__(self, slack_bytes: int = _SLACK_BYTES, every: int = _EVERY) -> None:
        self._slack_bytes = slack_bytes
        self._every = every
        self._runs = 0
        self._needed_bytes = resident_bytes()

    def settle(self) -> None:
        """A run is over: return freed memory if the process grew by more than the slack since it was last returned."""
        self._runs += 1
        if self._runs % self._every:
            return
        if resident_bytes() - self._needed_bytes > self._slack_bytes and (trim := getattr(_C, "malloc_trim", None)):
            trim(0)
            self._needed_bytes = resident_bytes()


def resident_bytes() -> int:
    """The memory of this process in use, as Linux counts it; 0 on systems that do not."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def share_one_arena() -> None:
    """Let all threads share one arena, which is better for ranks that take turns. glibc gives each thread its own."""
    if mallopt := getattr(_C, "mallopt", None):
        mallopt(_M_ARENA_MAX, 1)


class Aborted(BaseException):
    """Unwinds the ranks of a run that has ended. Not an Exception, so that user code does not catch it by accident."""


Job = Callable[[], Callable[[], None]]


class RankThread:
    """A thread that runs one job at a time. A job returns what to call last, when the thread is about to sleep."""

    def __init__(self) -> None:
        self._clean = False
        self._interrupted = False
        self._job: Job | None = None
        self._given = taken_lock()
        self._ended = taken_lock()
        self.thread = threading.Thread(target=self._serve, name="rank (idle)", daemon=True)
        self.thread.start()

    def begin(self, name: str, job: Job | None) -> None:
        """Run a job, which must not raise, in a fresh context; None ends the thread."""
        self.thread.name = name
        self._job = job
        self._given.release()

    def end(self) -> None:
        """End the idle thread."""
        self.begin("rank (ending)", None)

    @property
    def reusable(self) -> bool:
        """Whether it can run another job; known when `wait_for_end` has said that the last one has ended.

        An interruption may come when the job is already over; then it ends the thread itself.
        """
        return self._clean and not self._interrupted

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait for the end of the job. Returns whether it came in time. Not to be called again after True."""
        return self._ended.acquire(timeout=timeout_s)

    def interrupt(self) -> None:
        """Raise Aborted in the thread as soon as it runs Python code again."""
        self._interrupted = True
        interrupt(self.thread)

    def _serve(self) -> None:
        with suppress(Aborted):
            _wait_for_the_waking_thread()
            # No variable holds the dict. The traceback of an exception keeps this frame longer than the thread, and
            # DTensor's caches, which lie in the dict, abort the process when they outlive their thread.
            born = _state_of_thread(_thread_dict()) if _shows_thread_locals(_thread_dict()) else None
            while not self._interrupted:
                self._given.acquire()
                if self._job is None:
                    break
                last: Callable[[], None] = do_nothing
                use_one_thread()  # for every job: the program before may have chosen another number
                try:
                    last = contextvars.Context().run(self._job)
                finally:
                    self._job = None
                    self._clean = _state_of_thread(_thread_dict()) == born
                    self._ended.release()
                last()


class RankThreads:
    """The idle threads of an engine."""

    def __init__(self) -> None:
        share_one_arena()  # measured: 2 small ranks take 5.1 ms of processor time, with an arena a thread 6.2
        self._idle: list[RankThread] = []

    def take(self, count: int) -> list[RankThread]:
        """`count` threads, of which some may be new."""
        # Measured: 2, 4, 8 small ranks take 5.1, 8.9, 16.6 ms of processor time, on new threads 5.8, 9.7, 18.2.
        taken = [self._idle.pop() for _ in range(min(count, len(self._idle)))]
        taken += [RankThread() for _ in range(count - len(taken))]
        return taken

    def give_back(self, threads: list[RankThread]) -> None:
        """Threads whose jobs have ended: keep the clean ones, end the others."""
        for thread in threads:
            if thread.reusable:
                thread.thread.name = "rank (idle)"
                self._idle.append(thread)
            else:
                thread.end()

    def end(self) -> None:
        """End all idle threads."""
        while self._idle:
            self._idle.pop().end()


def interrupt(thread: threading.Thread) -> None:
    """Raise Aborted in a thread as soon as it runs Python code again."""
    if not isinstance(sys.unraisablehook, _ReportOthers):
        sys.unraisablehook = _ReportOthers(sys.unraisablehook)
    if not isinstance(threading.excepthook, _ReportOthers):
        threading.excepthook = _ReportOthers(threading.excepthook)
    ident = ctypes.c_ulong(thread.ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Aborted))


class _ReportOthers:
    """A hook for unhandled exceptions that leaves out Aborted.

    An interruption may come while the thread is in a callback of a weak reference, or in `__del__`. Python drops it
    there with a message on the terminal, and the scheduler interrupts once more. The last interruption may come when
    the thread has left its work already and is about to end.
    """

    def __init__(self, hook: Callable[[Any], object]) -> None:
        self._hook = hook

    def __call__(self, unhandled: Any) -> None:
        """Pass all exceptions but Aborted to the hook that was there."""
        if not (isinstance(unhandled.exc_type, type) and issubclass(unhandled.exc_type, Aborted)):
            self._hook(unhandled)


def do_nothing(*_: object) -> None:
    """Nothing to call last."""


def _wait_for_the_waking_thread() -> None:
    """On Linux: the calling thread, when woken, waits until the thread that woke it sleeps.

    The waking thread holds the interpreter until then, so running at once would cost two context switches for nothing.
    Threads and processes that the rank starts do not inherit this.
    """
    # Measured on 2 idle cores: 2, 4, 8 small ranks take 1.4 times what bare ranks do, without it 1.4, 1.6 and 1.7.
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def taken_lock() -> threading.Lock:
    """A lock that is taken: a signal that `release` sends and `acquire` awaits."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _thread_dict() -> dict[Any, Any]:
    """The dict of the calling thread, in which CPython up to 3.12 keeps its thread-locals."""
    get = ctypes.pythonapi.PyThreadState_GetDict
    get.restype = ctypes.c_void_p  # a borrowed reference
    found: dict[Any, Any] = ctypes.cast(get(), ctypes.py_object).value
    return found


def _shows_thread_locals(own: dict[Any, Any]) -> bool:
    before = len(own)
    probe = threading.local()
    probe.seen = True
    return len(own) == before + 1


def _state_of_thread(own: dict[Any, Any]) -> tuple[Any, ...]:
    """State that a program can leave behind in a thread: Python's thread-locals and torch's switches.

    Autocast and inference mode show in the dispatch keys. Py_Repr is Python's own.
    """
    return set(own) - {"Py_Repr"}, *thread_switches()


_LOOKS = 20
"""How many looks, a millisecond or more apart, must find a thread at the same place for it to stand still."""
_TASK = Path("/proc/self/task")
_WAITS_IN = (threading.__file__, executors.__file__)


@contextmanager
def follow_threads(left: Callable[[Any], None]) -> Iterator[None]:
    """Inside, threads that ranks start are in their worlds; `left(tables)` is called in each when it is done."""
    start, submit, started = threading.Thread.start, ThreadPoolExecutor.submit, list[threading.Thread]()

    def start_of_rank(thread: threading.Thread) -> None:
        tables = rank_tables()
        if tables is not None and not thread.ident:
            thread.daemon = True
            run, context = thread.run, copy_context()

            def as_rank() -> None:
                vars(thread).pop("run", None)  # it refers to the thread
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
    use_one_thread()
    with in_world_of(tables):
        try:
            return function(*args, **words)
        finally:
            left(tables)


class Stillness:
    """Looks at one thread again and again: whether it is blocked (a lock, a queue, a sleep) or has ended.

    `strictly`: it was not even awake in between, like a thread that sleeps again and again. Only Linux shows this.
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
        now = (id(frame), frame.f_lasti, self._read_file("schedstat") if self._strictly else b"")
        self._times = self._times + 1 if now == self._seen and self._sleeps(frame.f_code.co_filename) else 0
        self._seen = now
        return self._times >= _LOOKS

    def _sleeps(self, file: str) -> bool:
        """Whether the thread sleeps, by Linux; elsewhere only Python code that waits for threads is known to sleep."""
        state = self._read_file("stat").rpartition(b")")[2].split()
        return state[0] != b"R" if state else file in _WAITS_IN

    def _read_file(self, name: str) -> bytes:
        """A file of the system on this thread, empty where there is none."""
        try:
            return (_TASK / str(self._native) / name).read_bytes()
        except OSError:
            return b""
