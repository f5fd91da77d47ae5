"""Programs for ranks of the pool: right ones, and ones that end badly, each in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist

from harness.engines.pool import PoolEngine

__all__ = ["calls_then", "family", "forever", "os_parent", "raises", "summed", "total"]


class OddError(Exception):
    """An exception that cannot be sent: it takes two arguments."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def summed(rank: int) -> float:
    """A right program: a sum over all ranks, in the world and in a group, with a backward."""
    x = torch.ones(2, requires_grad=True)
    (x * (rank + 1)).sum().backward()
    assert x.grad is not None
    dist.all_reduce(x.grad, group=dist.new_group(list(range(dist.get_world_size()))))
    dist.all_reduce(x.grad)
    return float(x.grad[0])


def total(world_size: int) -> float:
    """What `summed` returns."""
    return world_size * world_size * (world_size + 1) / 2


def calls_then(rank: int, ending: str) -> None:
    """One good call, then rank 1 ends in some way while the others go on to the next call."""
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        _end(ending)
    dist.all_reduce(torch.ones(3))


def _end(ending: str) -> None:
    if ending == "exit":
        os._exit(3)
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "abort":
        os.abort()
    if ending == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    while ending == "loop":
        time.sleep(0.01)
    if ending == "child":
        subprocess.Popen(["sleep", "600"])
        os._exit(0)


def raises(rank: int, kind: str) -> None:
    """Rank 1 raises, in forward or in backward, something that can be sent or not; the others wait for it."""
    x = torch.ones(2, requires_grad=True)
    if rank == 1 and kind == "odd":
        raise OddError("not ", "here")
    if rank == 1 and kind == "backward":
        x.register_hook(_refuse)
    (x * 2).backward(torch.ones(2))
    if rank == 1 and kind == "plain":
        raise KeyError("missing")
    dist.all_reduce(torch.ones(3))


def _refuse(gradient: torch.Tensor) -> None:
    raise ValueError("no gradient wanted")


def family(engine: PoolEngine) -> list[int]:
    """The pids of the fork server and of the ranks of an engine that has run."""
    pids: list[int] = engine.run(_pid, world_size=2)
    return [os_parent(pids[0]), *pids]


def _pid(rank: int) -> int:
    return os.getpid()


def os_parent(pid: int) -> int:
    """The parent of a process, as /proc tells."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def forever(rank: int) -> None:
    """Rank 0 sleeps, the others wait for it."""
    if rank == 0:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
