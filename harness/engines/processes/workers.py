"""Workers: processes of Python's multiprocessing, whatever they run and however they are started.

The driver of a worker is the process that started it. The two share a pipe, and memory with a flight recorder and the
stacks that the worker prints after it. A worker ends with its driver, also during native code. Times are seconds.

How a worker ended is a ProcessEnd. A crash (SIGSEGV, SIGABRT, ...) and an exit status come from the program that it
ran. Any other signal comes from outside: SIGKILL as the system sends it when memory runs out, SIGTERM from a launcher.
"""

import faulthandler
import fcntl
import gc
import itertools
import logging
import multiprocessing
import os
import re
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, NoReturn, TextIO, TypeVar

from shardproof.harness.engines.calls.callers import is_user, shorten_path
from shardproof.harness.engines.processes.flight_recorder import RECORDER_BYTES, Recording, anonymous_file
from shardproof.harness.torch_internals.lookup import replace_attribute

OUR_STATUS = 70
"""The exit status of a rank's process that ended by a bug of this package: EX_SOFTWARE of sysexits.h."""
_CRASHES = frozenset({"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS"})


class ProcessEnd(NamedTuple):
    """How a process ended, in `words`; `by_program`: whether the program that it ran ended it."""

    words: str
    by_program: bool = False


def process_end(code: int) -> ProcessEnd:
    """The end of a process with this code, as subprocess has it: its exit status, or minus the signal's number."""
    if code >= 0:
        return ProcessEnd(f"its process ended with exit status {code}", code != OUR_STATUS)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    words = f"killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")
    return ProcessEnd(words, name in _CRASHES)


STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""On this signal a worker prints the stacks of all its threads."""
_BURIAL_S = 2.0
"""How long a busy machine may take to report the end of a worker whose pipe has closed."""
_MESSAGE_S = 30.0
"""How long to wait for the rest of a message, or for a message to be received."""
_SERVER_DIED = 255
"""multiprocessing's exit code of a worker whose fork server has ended."""
_GONE = ProcessEnd("its process is gone")
_BEGIN = b"begin"
"""The driver's first message. From then on it writes nothing to the sentinel by which workers see its end."""
_LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_CALLERS = 3
Key = TypeVar("Key")


class StackLine(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{shorten_path(self.file)}:{self.line} in {self.function}"


class Worker:
    """The driver's end of a worker: its `process` and the `pipe` to it.

    `memory` is a descriptor of the memory that both see, `recording` the flight recorder in it.
    """

    def __init__(self, start: Any, target: Callable[..., object], *words: Any, leads: bool = False) -> None:
        """Start a worker that calls `target(pipe, memory, *words)` with its own ends.

        `start` is a context of multiprocessing. A worker that `leads` is killed together with all that it has started.
        """
        ours, theirs = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(_MESSAGE_S), 0))
        self.pipe, self.memory, self._leads = Connection(ours.detach()), anonymous_file(), leads
        self.recording = Recording(self.memory)
        os.lseek(self.memory, RECORDER_BYTES, os.SEEK_SET)  # where stacks are printed
        forks = start.get_start_method() == "fork"
        inherited = (self.pipe, multiprocessing.get_start_method(allow_none=True)) if forks else (None, None)
        with Connection(theirs.detach()) as other, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside another thread (a progress bar)
            words = (inherited, other, _Memory(self.memory), leads, target, words)
            self.process = start.Process(target=_live, args=words, name="MainProcess")  # the name that programs expect
            try:
                with nullcontext() if forks else replace_attribute(spawn, "get_preparation_data", _preparation_words):
                    self.process.start()
            except BaseException:
                self._release()
                raise
        self.send(_BEGIN)

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self.process.pid or 0

    def send(self, message: bytes) -> None:
        """Send a message. A process that cannot receive it shows as dead or silent when its pipe is read."""
        with suppress(OSError):
            self.pipe.send_bytes(message)

    def end(self, limit_s: float = _BURIAL_S) -> ProcessEnd | None:
        """How the worker ended; None if it has not after this time. If it leads, what it has started is killed."""
        self.process.join(limit_s)
        code = self.process.exitcode
        if code is None:
            return None
        is_there = code == _SERVER_DIED and self._is_there()
        if self._leads:
            self._kill(os.killpg)
            self._leads = False  # another process may get the number
        return ProcessEnd("its fork server has ended") if is_there else process_end(code)

    def kill(self) -> ProcessEnd:
        """End the worker, whatever it is doing; if it leads, also what it has started."""
        if self._leads:
            self._kill(os.killpg)
        if self.process.exitcode is None:
            self._kill(os.kill)
        return self.end() or _GONE

    def close(self, leave_s: float = 0.0) -> None:
        """End the worker unless it ends by itself within this time. A second call does nothing."""
        self.pipe.close()
        if self.memory >= 0:
            if self.end(leave_s) is None:
                self.kill()
            self._release()

    def stack(self, begin: str, end: str) -> tuple[StackLine, ...]:
        """The printed stack of the thread with this headline, innermost first, up to the frames of a file."""
        printed = os.pread(self.memory, 1 << 20, RECORDER_BYTES).decode(errors="replace")
        lines = map(_LINE.match, printed.partition(begin)[2].partition("hread 0x")[0].splitlines())
        frames = [StackLine(line["file"], int(line["line"]), line["function"]) for line in lines if line]
        return tuple(itertools.takewhile(lambda frame: frame.file != end, frames))

    def crashed_at(self) -> str:
        """The stack in the user's code at which it crashed, innermost first; "" if unknown."""
        frames = [str(frame) for frame in self.stack("Current thread 0x", __file__) if is_user(frame.file)]
        return ", called from ".join(frames[:_CALLERS])

    def _release(self) -> None:
        self.pipe.close()
        self.recording.close()
        os.close(self.memory)
        self.memory = -1

    def _is_there(self) -> bool:
        with suppress(ProcessLookupError):
            os.kill(self.pid, 0)
            return True
        return False

    def _kill(self, send: Callable[[int, int], None]) -> None:
        with suppress(ProcessLookupError, PermissionError):
            send(self.pid, signal.SIGKILL)


def receive(workers: Mapping[Worker, Key], limit_s: float | None) -> Iterator[tuple[Key, bytes | ProcessEnd]]:
    """Wait until a worker sends something or ends, or the time is over. Yield what came, by the keys of the workers."""
    ready = wait([part for worker in workers for part in (worker.pipe, worker.process.sentinel)], limit_s)
    for worker, key in workers.items():
        message: bytes | ProcessEnd | None = None
        if worker.pipe in ready:
            with suppress(EOFError, OSError):
                message = worker.pipe.recv_bytes()
        elif worker.process.sentinel not in ready:
            continue
        yield key, message if message is not None else worker.end() or _GONE


def _preparation_words(name: str) -> dict[str, object]:
    """What multiprocessing tells a new process; nothing of `__main__`, which may be a script without a guard."""
    return {"name": name, "sys_path": [*sys.path], "dir": os.getcwd()}


class _Memory:
    """A descriptor on its way into another process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[object, ...]:
        return _receive_memory, (DupFd(self.descriptor),)


def _receive_memory(descriptor: Any) -> _Memory:
    return _Memory(descriptor.detach())


def _live(
    inherited: tuple[Connection | None, str | None],
    pipe: Connection,
    memory: _Memory,
    leads: bool,
    target: Callable[..., object],
    words: tuple[object, ...],
) -> NoReturn:
    """The life of a worker's process."""
    status = OUR_STATUS
    try:
        if inherited[0] is not None:
            inherited[0].close()
        multiprocessing.set_start_method(inherited[1], force=True)  # None: a program may still choose
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the driver, which ends this process
        if leads:
            os.setpgid(0, 0)
        pipe.recv_bytes()
        _end_with_driver()
        reopen_output()
        faulthandler.enable(memory.descriptor)
        faulthandler.register(STACK_SIGNAL, file=memory.descriptor, all_threads=True)
        gc.freeze()  # what is loaded now stays: it is shared with other processes, and never collected
        target(pipe, memory.descriptor, *words)
        status = 0
    except (EOFError, ConnectionError):  # the driver has closed the pipe, and does not need this worker
        status = 0
    except SystemExit as leaving:  # raised by the program outside of a rank, such as by an import
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # a bug of this package must not look like one of the program
        traceback.print_exc()
    sys.exit(status)  # exit normally: otherwise a profiler loses the last events of the process


def _end_with_driver() -> None:
    """Have Linux kill this process when its driver is gone, and if it leads, also what it has started.

    The driver writes nothing more to the sentinel, so a signal from the sentinel means the driver's end.
    """
    driver = multiprocessing.parent_process()
    if sys.platform == "linux" and driver is not None:
        fcntl.fcntl(driver.sentinel, fcntl.F_SETOWN, -os.getpid() if os.getpgrp() == os.getpid() else os.getpid())
        fcntl.fcntl(driver.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(driver.sentinel, fcntl.F_SETFL, fcntl.fcntl(driver.sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def reopen_output() -> None:
    """Replace standard output and error, in handlers of loggers too, by files whose locks nobody holds.

    When this process was forked, a thread of a progress bar may have held the locks of the old ones.
    """
    for name in ("stdout", "stderr"):
        before = getattr(sys, name)
        after = _reopen_stream(before)
        for handler in handlers_of(before):
            handler.stream = after  # `setStream` flushes the old one, which waits for its lock
        setattr(sys, name, after)


def handlers_of(*streams: Any) -> "list[logging.StreamHandler[Any]]":
    """The handlers of all loggers that write to one of these streams, which they took when they were made.

    logging's last resort, and handlers of libraries, look for sys.stderr at each line; their stream cannot be set.
    """
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = {id(handler): handler for logger in loggers for handler in logger.handlers}
    known = [one for one in handlers.values() if isinstance(one, logging.StreamHandler) and "stream" in vars(one)]
    return [handler for handler in known if any(handler.stream is stream for stream in streams)]


def _reopen_stream(stream: TextIO) -> TextIO:
    """Another file of the same descriptor; the stream itself if it has none."""
    try:
        return os.fdopen(os.dup(stream.fileno()), "w", 1, encoding=stream.encoding, errors=stream.errors)
    except (OSError, ValueError, AttributeError):
        return stream
