"""A process that proves cases in the place of this one, so that a case that ends its process ends no other.

Its process is a fork, which costs milliseconds where a fresh interpreter loads torch again. A fork is sound only while
this process has started no threads (`forkable`), initialised no device, and run no autograd (`forked` finds out).
"""

import ctypes
import faulthandler
import gc
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import BinaryIO, TextIO

import torch

from shardproof.harness.engines.calls.callers import is_user, shortened

_FIT_S = 30.0
"""How long the new process may take to try its autograd."""
_LOOK_S = 0.002
_LEAVE_S = 5.0
"""How long a process without work may take to end by itself."""
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_CURRENT = "Current thread"
_OURS = "in serve"
_FRAMES = 3
_PR_SET_PDEATHSIG = 1
"""By prctl(2)."""


class ForkedProcess:
    """This process's end of it: `connection` to it, and its end."""

    def __init__(self, serve: Callable[[Connection], object]) -> None:
        """Fork; the new process calls `serve` with its end of the connection, and ends."""
        ours, theirs = socket.socketpair()
        self._stacks: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside the thread of a progress bar
            self.pid = os.fork()
        if not self.pid:
            ours.close()
            _served(serve, Connection(theirs.detach()), self._stacks)
        theirs.close()
        self.connection = Connection(ours.detach())
        self._code: int | None = None

    def wait(self, limit_s: float) -> int | None:
        """Its exit status, or minus the number of the signal that ended it; None when it is still there after that."""
        end_s = time.monotonic() + limit_s
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end_s:
                break
            else:
                time.sleep(_LOOK_S)
        return self._code

    def kill(self) -> None:
        """End it, whatever it is doing."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def stood(self) -> str:
        """Where it was when it crashed, in the user's code, innermost first; "" where nothing is known."""
        self._stacks.seek(0)
        crash = self._stacks.read().decode("utf-8", "replace").rpartition(_CURRENT)[2]
        stack = crash.partition("\n\n")[0].partition(_OURS)[0]
        frames = [frame for frame in _FRAME.finditer(stack) if is_user(frame["file"])]
        places = [f"{shortened(frame['file'])}:{frame['line']} in {frame['function']}" for frame in frames[:_FRAMES]]
        return ", called from ".join(places)

    def close(self) -> None:
        """Let it end, or end it when it is at work; a second time does nothing."""
        self.connection.close()
        if self.wait(_LEAVE_S) is None:
            self.kill()
            self.wait(_LEAVE_S)
        self._stacks.close()


def _served(serve: Callable[[Connection], object], connection: Connection, stacks: BinaryIO) -> None:
    """The new process, to its end."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the first process, which ends this one
        _end_with_parent()
        sys.stdout, sys.stderr = _reopened(sys.stdout), _reopened(sys.stderr)
        faulthandler.enable(stacks)
        torch.ones((), requires_grad=True).backward()
        connection.send("fit")
        gc.freeze()
        serve(connection)
        status = 0
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _end_with_parent() -> None:
    """Have Linux end this process with the one that forked it, also amid a case; elsewhere it ends with its case."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reopened(stream: TextIO) -> TextIO:
    """File without locks that a thread of a progress bar held when this process was forked."""
    try:
        return os.fdopen(os.dup(stream.fileno()), "w", 1, encoding=stream.encoding, errors=stream.errors)
    except (OSError, ValueError, AttributeError):
        return stream


def forkable(device: str) -> bool:
    """Whether this process may be forked, as far as it can be known before: no other thread, no device."""
    return hasattr(os, "fork") and device == "cpu" and threading.active_count() == 1 and not torch.cuda.is_initialized()


def forked(serve: Callable[[Connection], object]) -> ForkedProcess | None:
    """A process that serves; None where autograd, which this process has used before, does not survive a fork."""
    process = ForkedProcess(serve)
    with suppress(EOFError, OSError):
        if process.connection.poll(_FIT_S) and process.connection.recv() == "fit":
            return process
    process.kill()
    process.close()
    return None
