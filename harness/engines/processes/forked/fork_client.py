"""The processes of a pool, as the driver holds them: fork servers, and workers forked from them.

A worker shares two descriptors with the driver: a socket and an anonymous file. Nothing is left in a file system, and
all processes end with the driver, however it ends. Every wait is bounded; times are seconds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from harness.engines.processes.flight_recorder import Recording, anonymous_file
from harness.engines.processes.forked.framing import FramedSocket
from harness.errors import MachineError
from harness.interpreter import command

_START_S = 120.0
_ANSWER_S = 30.0
_MAIN = "harness.engines.processes.forked.fork_server:main"
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Unless the environment has another level: torch warns with a native stack of a store whose driver was killed."""


@dataclass(slots=True, eq=False)
class PoolWorker:
    """One worker of the pool and its server; `recorder_file` is a descriptor of the memory of its flight recorder."""

    pid: int
    frames: FramedSocket
    recorder_file: int
    server: ForkServer
    recording: Recording = field(init=False)

    def __post_init__(self) -> None:
        self.recording = Recording(self.recorder_file)

    def close(self) -> None:
        """Release it: a worker that waits for its next order ends when its socket closes."""
        self.frames.sock.close()
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
                env=_QUIET | dict(os.environ) | _ONE_THREAD | {"PYTHONHASHSEED": str(hash_seed)},
            )
        self.sock = ours
        self.died: dict[int, int] = {}
        self._lines = b""
        self._ready = False

    def fork(self) -> PoolWorker:
        """A new worker. Raises MachineError when the server does not answer."""
        if not self._ready:
            self._expect("ready", _START_S)
            self._ready = True
        ours, theirs = socket.socketpair()
        file = anonymous_file()
        try:
            with theirs:
                socket.send_fds(self.sock, [b'{"fork": 1}\n'], [theirs.fileno(), file])
            pid = self._expect("forked", _ANSWER_S)
        except (OSError, MachineError) as problem:
            ours.close()
            os.close(file)
            raise _failed(str(problem)) from problem
        self.died.pop(pid, None)  # of an earlier process that had the same number
        return PoolWorker(pid, FramedSocket(ours), file, self)

    def kill(self, processes: Iterable[PoolWorker]) -> None:
        """Kill these workers and wait until they are gone."""
        pids = [process.pid for process in processes if process.pid not in self.died]
        if not pids:
            return
        with suppress(OSError):  # the server has ended, and its workers with it
            self.sock.sendall(json.dumps({"kill": pids}).encode() + b"\n")
            until_s = time.monotonic() + _ANSWER_S
            while not self.died.keys() >= set(pids) and time.monotonic() < until_s:
                self.listen(until_s - time.monotonic())

    def listen(self, limit_s: float) -> list[dict[str, int]]:
        """Take in the server's messages. Raises MachineError when it has ended or sends nothing within the limit."""
        self.sock.settimeout(max(limit_s, 0.001))
        try:
            data = self.sock.recv(1 << 16)
        except TimeoutError:
            raise _failed(f"no answer within {limit_s:g} s") from None
        except OSError as problem:
            raise _failed(str(problem)) from problem
        if not data:
            raise _failed("it has ended; its messages are on stderr")
        *lines, self._lines = (self._lines + data).split(b"\n")
        messages: list[dict[str, int]] = [json.loads(line) for line in lines]
        self.died |= {message["died"]: message["status"] for message in messages if "died" in message}
        return messages

    def close(self) -> None:
        """End the server, which ends its workers."""
        self.sock.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ANSWER_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _expect(self, word: str, limit_s: float) -> int:
        until_s = time.monotonic() + limit_s
        while True:
            for message in self.listen(until_s - time.monotonic()):
                if word in message:
                    return message[word]


def _failed(why: str) -> MachineError:
    return MachineError(f"the fork server of the pool failed: {why}", ranks=(), positions=())
