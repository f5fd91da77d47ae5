"""The fork server: a process that has imported everything once, and forks a worker at each request.

`main` runs in the server. One line of JSON each way: "fork" comes with two descriptors (the worker's socket, the file
of its flight recorder) and is answered with the pid; "kill" names pids; "died" reports a pid and its status as
os.waitpid does. When its own socket closes, because the driver has ended or was killed, the server kills every worker
and what they started, and ends. It lives in a session of its own, so that a Ctrl-C reaches the driver alone.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from harness.engines.processes.exit_status import OUR_STATUS

__all__ = ["PRELOADED", "main"]

PRELOADED = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",  # what the first backward of a process would import, for 0.35 s
    "harness.running.ranks.execution",
)
_WORKER = "harness.engines.processes.forked.link:serve"
_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0
"""How often the server checks that its driver still runs, should a copy of the socket be open elsewhere."""


def main(descriptor: int) -> None:
    """Serve the driver at the other end of this socket until it is gone."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = os.getppid()
    control = socket.socket(fileno=descriptor)
    for name in PRELOADED:
        importlib.import_module(name)
    module, _, function = _WORKER.partition(":")
    serve = getattr(importlib.import_module(module), function)
    gc.freeze()  # what is loaded now is shared by all workers and never scanned again
    gc.enable()  # imports, which make no garbage, were done without
    _Server(control, driver, serve).run()


class _Server:
    """The loop: orders from the driver, deaths of workers."""

    def __init__(self, control: socket.socket, driver: int, serve: Any) -> None:
        self._control = control
        self._driver = driver
        self._serve = serve
        self._alive: set[int] = set()
        self._lines = b""
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def run(self) -> None:
        """Until the driver is gone."""
        self._send({"ready": os.getpid()})
        while True:
            readable, _, _ = select.select([self._control.fileno(), self._woken], [], [], _LOOK_S)
            if self._woken in readable:
                os.read(self._woken, 4096)
            self._report_deaths()
            if (self._control.fileno() in readable and not self._orders()) or os.getppid() != self._driver:
                break
        for pid in self._alive:
            _kill(pid)
        os._exit(0)

    def _orders(self) -> bool:
        """Carry out what has come; False when nothing will come any more."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 8)
        except ConnectionError:  # the driver was killed before it had read the last message
            return False
        *lines, self._lines = (self._lines + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            for pid in order.get("kill", ()):
                if pid in self._alive:
                    _kill(pid)
            if order.get("fork"):
                self._fork(descriptors)
                descriptors = []
        return bool(data)

    def _fork(self, descriptors: Sequence[int]) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(parent, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._alive.add(pid)
        self._send({"forked": pid})

    def _become(self, parent: int, link: int, recorder_file: int) -> NoReturn:
        """The life of a worker, from here to its end."""
        status = OUR_STATUS
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            os.setpgid(0, 0)
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                self._serve(socket.socket(fileno=link), recorder_file)
                status = 0
        except BaseException:  # a bug of this package, which must not look like one of the program's
            traceback.print_exc()
        finally:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _report_deaths(self) -> None:
        """Report the workers that have died, and kill what they have started."""
        while self._alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._alive.discard(pid)
            _kill(pid)
            self._send({"died": pid, "status": status})

    def _send(self, message: dict[str, int]) -> None:
        with suppress(OSError):  # the driver is gone: the next read of its socket ends this
            self._control.sendall(json.dumps(message).encode() + b"\n")


def _kill(pid: int) -> None:
    """Kill a worker and the processes that it started, which are its process group."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)
