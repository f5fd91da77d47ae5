"""Workers that are forked from this process, in milliseconds; a new interpreter would load torch again.

A fork is safe only if this process has started no threads, initialised no device (`forkable`) and left autograd in a
state that a fork survives (`fork_worker` tries it).
"""

import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from shardproof.harness.engines.processes.workers import Worker

_FIT_S = 30.0
"""How long the new process may take to try autograd."""
_FIT = b"fit"


def forkable(device: str) -> bool:
    """Whether this process may be forked, as far as is known beforehand: no other thread, no device."""
    return hasattr(os, "fork") and device == "cpu" and threading.active_count() == 1 and not torch.cuda.is_initialized()


def fork_worker(serve: Callable[[Connection], object]) -> Worker | None:
    """A worker that serves; None if autograd, used before in this process, does not survive the fork."""
    worker = Worker(multiprocessing.get_context("fork"), _try, serve)
    with suppress(EOFError, OSError):
        if worker.pipe.poll(_FIT_S) and worker.pipe.recv_bytes() == _FIT:
            return worker
    worker.close()
    return None


def _try(connection: Connection, _memory: int, serve: Callable[[Connection], object]) -> None:
    torch.ones((), requires_grad=True).backward()
    connection.send_bytes(_FIT)
    serve(connection)
