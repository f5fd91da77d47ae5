"""Python's fork server, with what ranks need: torch is loaded, strings are hashed by a seed, no file is left anywhere.

multiprocessing itself has a single one, with the hash seed of its driver. Its socket lies in the file system, and stays
there when the driver is killed. Ours lives in a session of its own, so that a Ctrl-C reaches the driver alone. Every
wait is bounded; times are seconds.
"""

import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver, resource_tracker, util
from typing import Any

from shardproof.harness.engines.one_thread import ONE_THREAD
from shardproof.harness.engines.processes.workers import Worker
from shardproof.harness.errors import MachineError
from shardproof.harness.interpreter import boot
from shardproof.harness.torch_internals.lookup import standing

_PRELOADED = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",  # what the first backward of a process would import, for 0.35 s
    "shardproof.harness.running.ranks.execution",
    "shardproof.harness.engines.processes.forked.worker",
)
_START_S = 120.0
_LOOK_S = 1.0
"""How often the driver says that it is alive while it waits."""
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Unless the environment has another level: torch warns with a native stack of a store whose driver was killed."""


class ForkServer(forkserver.ForkServer):
    """A fork server in which, as in its workers, Python hashes strings with `hash_seed`.

    The server starts when it is needed, again where it has ended; `alive` is called now and then meanwhile.
    """

    _forkserver_address: Any
    _forkserver_alive_fd: Any
    _forkserver_pid: int | None

    def __init__(self, hash_seed: int) -> None:
        super().__init__()
        self.hash_seed = hash_seed
        self.alive: Callable[[], object] = str
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = -1
        self.set_forkserver_preload([*_PRELOADED])

    def start(self, target: Callable[..., object]) -> Worker:
        """A new worker that calls `target`. Raises MachineError when none can be started."""
        try:
            with standing(forkserver, "connect_to_new_process", self.connect_to_new_process):
                return Worker(multiprocessing.get_context("forkserver"), target, leads=True)
        except (EOFError, OSError, subprocess.TimeoutExpired) as problem:
            why = str(problem) if isinstance(problem, TimeoutError) else "it has ended; its messages are on stderr"
            raise MachineError(f"the fork server of the pool failed: {why}") from problem

    def ensure_running(self) -> None:
        """Start it where it does not run. Its socket has no name from then on: it is reached by its descriptor."""
        resource_tracker.ensure_running()
        with (
            standing(util, "spawnv_passfds", self._spawned),
            standing(connection, "arbitrary_address", lambda _family: tempfile.mktemp(prefix="shardproof-")),
        ):
            super().ensure_running()
        if not self._forkserver_address.startswith("/proc/"):
            self._release()
            self._socket = os.open(self._forkserver_address, os.O_PATH | os.O_CLOEXEC)
            os.unlink(self._forkserver_address)
            self._forkserver_address = f"/proc/self/fd/{self._socket}"

    def connect_to_new_process(self, fds: Sequence[int]) -> tuple[int, int]:
        """As Python's. Raises TimeoutError when it does not answer."""
        ends: tuple[int, int]
        try:
            ends = super().connect_to_new_process(fds)
        except ConnectionError:  # it was killed a moment before: a socket closes before the end can be waited for
            self._forget(_START_S)
            ends = super().connect_to_new_process(fds)
        until_s = time.monotonic() + _START_S
        while not connection.wait([ends[0]], _LOOK_S):
            self.alive()
            if time.monotonic() > until_s:
                for descriptor in ends:
                    os.close(descriptor)
                raise TimeoutError(f"no answer within {_START_S:g} s")
        return ends

    def close(self) -> None:
        """End it: its workers are ended before."""
        if self._forkserver_pid is not None and self._process is not None:
            self._process.kill()
            self._forget()

    def _forget(self, limit_s: float | None = None) -> None:
        """Wait for its end, so that the next worker starts another one."""
        if self._forkserver_pid is not None and self._process is not None:
            self._process.wait(limit_s)
            self._forkserver_pid = None
            os.close(self._forkserver_alive_fd)
            self._release()

    def _release(self) -> None:
        if self._socket >= 0:
            os.close(self._socket)
        self._socket = -1

    def _spawned(self, _path: str, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        """Start Python with these arguments, the last of which is its program."""
        if self._process is not None:  # it has ended
            self._process.wait()
        self._process = subprocess.Popen(
            [*arguments[:-1], boot() + arguments[-1]],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            env=_QUIET | dict(os.environ) | ONE_THREAD | {"PYTHONHASHSEED": str(self.hash_seed)},
            start_new_session=True,
        )
        return self._process.pid
