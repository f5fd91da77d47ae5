"""The fork server: a process that has imported everything once, and forks a worker at each request.

Each worker shares two descriptors with the process that requested it: a pipe, and an anonymous file with its flight
recorder. Messages of the server are pairs of a word and numbers. "fork" comes with the two descriptors and is answered
by "forked" and the pid; "kill" names pids. "died" reports a pid and its status as os.waitpid does.

Nothing is left in a file system. When the server's own pipe closes, because its driver has ended or was killed, it
kills every worker and what they started, and ends. The server lives in a session of its own, so that a Ctrl-C reaches
the driver alone. Every wait is bounded; times are seconds.
"""

import ctypes
import gc
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

from shardproof.harness.engines.one_thread import ONE_THREAD
from shardproof.harness.engines.processes.exit_status import OUR_STATUS, ProcessEnd, process_end
from shardproof.harness.engines.processes.flight_recorder import Recording, anonymous_file
from shardproof.harness.errors import MachineError
from shardproof.harness.interpreter import command

_PRELOADED = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",  # what the first backward of a process would import, for 0.35 s
    "shardproof.harness.running.ranks.execution",
)
_MAIN = "shardproof.harness.engines.processes.forked.fork_server:main"
_START_S = 120.0
_ANSWER_S = 30.0
_BURIAL_S = 2.0
"""How long a server may take, on a busy machine, to report how a worker ended whose pipe has closed."""
_LOOK_S = 1.0
"""How often the server checks that its driver still runs, should a copy of the pipe be open elsewhere."""
_PR_SET_PDEATHSIG = 1
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Unless the environment has another level: torch warns with a native stack of a store whose driver was killed."""


class Worker:
    """A worker and its server; `recorder_file` is a descriptor of the memory of its flight recorder."""

    def __init__(self, pid: int, pipe: Connection, recorder_file: int, server: "ForkServer") -> None:
        self.pid, self.pipe, self.recorder_file, self.server = pid, pipe, recorder_file, server
        self.recording = Recording(recorder_file)

    def send(self, message: bytes) -> None:
        """Send a message. A process that cannot receive it shows as dead or silent when its pipe is read."""
        with suppress(OSError):
            self.pipe.send_bytes(message)

    def end(self, limit_s: float = _BURIAL_S) -> ProcessEnd:
        """Its ending, which its server reports, at most `limit_s` later; to be called when its pipe has closed."""
        end_s = time.monotonic() + limit_s
        with suppress(MachineError):  # the server has ended too
            while self.pid not in self.server.died and (left_s := end_s - time.monotonic()) > 0:
                self.server.listen(left_s)
        status = self.server.died.get(self.pid)
        return ProcessEnd("its process is gone") if status is None else process_end(os.waitstatus_to_exitcode(status))

    def close(self) -> None:
        """Release it: a worker that waits for its next order ends when its pipe closes."""
        self.pipe.close()
        self.recording.close()
        os.close(self.recorder_file)


class ForkServer:
    """The driver's end of a fork server. `died` by pid is the status of workers that have ended.

    Python hashes strings with `hash_seed` in the server and in its workers. The server starts when it is made; the
    first fork waits until it is ready.
    """

    def __init__(self, hash_seed: int) -> None:
        self.hash_seed = hash_seed
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                command(_MAIN, theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_QUIET | dict(os.environ) | ONE_THREAD | {"PYTHONHASHSEED": str(hash_seed)},
            )
        self.pipe = _bounded(ours)
        self.died: dict[int, int] = {}
        self._ready = False

    def await_ready(self, alive: Callable[[], object] = str) -> None:
        """Wait until it has imported everything, and call `alive` now and then. Raises MachineError."""
        until_s = time.monotonic() + _START_S
        while not self._ready:
            alive()
            with suppress(OSError):  # `_expect` says that it has ended
                if not self.pipe.poll(_LOOK_S) and time.monotonic() < until_s:
                    continue
            self._expect("ready", _LOOK_S)
            self._ready = True

    def fork(self) -> Worker:
        """A new worker. Raises MachineError when the server does not answer."""
        self.await_ready()
        ours, theirs = socket.socketpair()
        file = anonymous_file()
        try:
            with theirs:
                self.pipe.send(("fork", ()))
                for descriptor in (theirs.fileno(), file):
                    send_handle(self.pipe, descriptor, self._process.pid)
            (pid,) = self._expect("forked", _ANSWER_S)
        except (OSError, MachineError) as problem:
            ours.close()
            os.close(file)
            raise _failed(str(problem)) from problem
        self.died.pop(pid, None)  # of an earlier process that had the same number
        return Worker(pid, _bounded(ours), file, self)

    def kill(self, workers: Iterable[Worker]) -> None:
        """Kill these workers and wait until they are gone."""
        pids = {worker.pid for worker in workers} - self.died.keys()
        if not pids:
            return
        with suppress(OSError):  # the server has ended, and its workers with it
            self.pipe.send(("kill", tuple(pids)))
            until_s = time.monotonic() + _ANSWER_S
            while not self.died.keys() >= pids and time.monotonic() < until_s:
                self.listen(until_s - time.monotonic())

    def listen(self, limit_s: float) -> tuple[str, tuple[int, ...]]:
        """Take in the server's next message. Raises MachineError when it has ended or sends none within the limit."""
        try:
            if not self.pipe.poll(max(limit_s, 0.0)):
                raise _failed(f"no answer within {limit_s:g} s")
            word, numbers = self.pipe.recv()
        except (EOFError, OSError) as problem:
            raise _failed("it has ended; its messages are on stderr") from problem
        if word == "died":
            pid, status = numbers
            self.died[pid] = status
        return word, numbers

    def close(self) -> None:
        """End the server, which ends its workers."""
        self.pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ANSWER_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _expect(self, word: str, limit_s: float) -> tuple[int, ...]:
        until_s = time.monotonic() + limit_s
        while True:
            answer, numbers = self.listen(until_s - time.monotonic())
            if answer == word:
                return numbers


def _bounded(sock: socket.socket) -> Connection:
    """The socket as a pipe on which the rest of a message that has begun is awaited, or taken, within a bound."""
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(_ANSWER_S), 0))
    return Connection(sock.detach())


def _failed(why: str) -> MachineError:
    return MachineError(f"the fork server of the pool failed: {why}")


def main(descriptor: int) -> None:
    """Serve the driver at the other end of this socket until it is gone."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = os.getppid()
    for name in _PRELOADED:
        importlib.import_module(name)
    worker: Any = importlib.import_module("shardproof.harness.engines.processes.forked.worker")
    gc.freeze()  # what is loaded now is shared by all workers and never scanned again
    gc.enable()  # imports, which make no garbage, were done without
    _Server(Connection(descriptor), driver, worker.serve).run()


class _Server:
    """The loop: orders from the driver, deaths of workers."""

    def __init__(self, driver: Connection, pid: int, serve: Callable[[Connection, int], None]) -> None:
        self._driver = driver
        self._driver_pid = pid
        self._serve = serve
        self._alive: set[int] = set()
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def run(self) -> None:
        """Until the driver is gone."""
        self._send("ready", os.getpid())
        with suppress(EOFError, OSError):  # the driver is gone
            while os.getppid() == self._driver_pid:
                ready = wait([self._driver, self._woken], _LOOK_S)
                if self._woken in ready:
                    os.read(self._woken, 4096)
                self._report_deaths()
                if self._driver in ready:
                    self._carry_out(*self._driver.recv())
        for pid in self._alive:
            _kill(pid)
        os._exit(0)

    def _carry_out(self, word: str, pids: tuple[int, ...]) -> None:
        """Carry out an order: kill these workers, or fork one."""
        for pid in self._alive.intersection(pids):
            _kill(pid)
        if word == "fork":
            parent, descriptors = os.getpid(), [recv_handle(self._driver) for _ in range(2)]
            pid = os.fork()
            if pid == 0:
                self._become(parent, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            self._alive.add(pid)
            self._send("forked", pid)

    def _become(self, parent: int, pipe: int, recorder_file: int) -> NoReturn:
        """The life of a worker, from here to its end."""
        status = OUR_STATUS
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._driver.close()
            os.setpgid(0, 0)
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                self._serve(Connection(pipe), recorder_file)
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
            self._send("died", pid, status)

    def _send(self, word: str, *numbers: int) -> None:
        with suppress(OSError):  # the driver is gone: the next read of its pipe ends this
            self._driver.send((word, numbers))


def _kill(pid: int) -> None:
    """Kill a worker and the processes that it started, which are its process group."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)
