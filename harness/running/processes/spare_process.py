"""A second interpreter, started before the first has loaded torch: both load at the same time.

It is a fresh one and no fork, for autograd does not survive one. It ends with the socket, so with the process that
started it. This module does not import torch.
"""

from __future__ import annotations

import os
import socket
import subprocess
from multiprocessing.connection import Connection

from harness.interpreter import command

_MAIN = "harness.running.second_process:serve"
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


class Spare:
    """The interpreter, and the connection to it: a request first, then cases; one answer a case."""

    def __init__(self) -> None:
        """Start it."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                command(_MAIN, theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for the first process, which ends this one
                env=dict(os.environ) | _ONE_THREAD,
            )
        self.connection = Connection(ours.detach())

    def wait(self, limit_s: float) -> int | None:
        """Its exit status, or minus the number of the signal that ended it; None when it is still there after that."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()

    def close(self) -> None:
        """End it, whatever it is doing; a second time does nothing."""
        self.connection.close()
        self.process.kill()
        self.process.wait()
