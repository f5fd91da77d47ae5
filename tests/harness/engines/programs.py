"""Programs for the ranks of any engine: right ones, and ones that end badly, each in one way.

`Log` is an observer of what they call.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store, get_node_local_rank
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardproof.harness.ledger import Call

gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""all_gather into one tensor, by the name that this torch has for it."""


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
    return world_size * world_size * (world_size + 1) / 2


def calls_then(rank: int, ending: str) -> None:
    """Issue one good call; then rank 1 ends in some way while the others go on to the next call."""
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        _end(ending)
    dist.all_reduce(torch.ones(3))


def _end(ending: str) -> None:
    if ending == "exit":
        os._exit(3)
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if ending == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)  # to be asked for its line it is woken
    if ending == "raise":
        raise ValueError("bad layer")
    if ending == "sleep":
        time.sleep(600)
    while ending == "loop":
        pass
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
    dist.all_reduce(torch.ones(3))


def exits(rank: int, status: int) -> str:
    if rank == 1:
        sys.exit(status)
    return "end"


def words(rank: int) -> list[Any]:
    """Words of a launcher's environment that libraries read, torch's own function among them."""
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    dist.barrier()
    found = [os.environ.get(name) for name in names]
    return [*found, os.getenv("RANK"), dict(os.environ)["RANK"], get_node_local_rank()]


def initialises(rank: int) -> list[str]:
    """A program that initialises torch itself: the errors of wrong words, and of the second time."""
    told = []
    dist.init_process_group("gloo", world_size=dist.get_world_size())
    wrong: tuple[dict[str, Any], ...] = ({"world_size": 8}, {"rank": 1 - rank}, {})
    for given in wrong:
        try:
            dist.init_process_group("gloo", **given)
        except ValueError as error:
            told.append(str(error))
    return told


def leaves_works(rank: int) -> list[float]:
    """Asynchronous calls, of which rank 1 never waits for one; works answer after their wait as before."""
    tensors = [torch.ones(2) * (rank + 1) for _ in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works[: 3 - rank]:
        assert work is not None and work.wait() and work.wait()
        assert work.is_completed() and work.is_success()
    first = works[0]
    assert first is not None and first.result()[0] is tensors[0]
    assert torch.equal(first.get_future().value()[0], tensors[0])
    dist.barrier()
    summed = functional.all_reduce(torch.ones(2), "sum", _get_default_group())
    return [*tensors[0].tolist(), *(summed + 0).tolist()]


def polls(rank: int) -> float:
    """Rank 0 asks for its calls until they are complete, and waits for none; rank 1 issues them late."""
    tensors = [torch.ones(2) for _ in range(3)]
    if rank:
        time.sleep(0.05)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        while not work.is_completed():
            time.sleep(0.0001)
    return float(sum(map(torch.sum, tensors)))


def drops_results(rank: int) -> float:
    """Results of functional collectives that nothing reads: dropped, viewed, made again; then one of an operator."""
    group = _get_default_group()
    functional.all_reduce(torch.ones(2), "sum", group)
    functional.all_reduce(torch.ones(2), "max", group).view(-1)
    x = torch.ones(2, requires_grad=True)
    total = checkpoint(lambda x: _Summed.apply(x * 3, group), x, use_reentrant=True).sum()
    total.backward()
    torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group.group_name)
    return float(total.detach())


class _Summed(torch.autograd.Function):
    """The sum over a group, whose gradient is passed on as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total: torch.Tensor = functional.all_reduce(x, "sum", group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def waits_alone(rank: int) -> None:
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
        work.wait()


def calls_alone(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(2))


def makes_alone(rank: int) -> None:
    if rank == 1:
        dist.new_group([0, 1])
    else:
        dist.all_reduce(torch.ones(3))


def wrapped(rank: int) -> list[float]:
    """A step of DDP, whose reducer is C++, and of FSDP2; the gradients are means over the ranks.

    DDP begins with the weights of rank 0, which come first.
    """
    torch.manual_seed(rank)
    parallel = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    began = parallel.module.weight.flatten().tolist()
    parallel(torch.ones(1, 2) * (rank + 1)).sum().backward()
    sharded = nn.Linear(2, 2, bias=False)
    fully_shard(sharded)
    sharded(torch.ones(1, 2) * (rank + 1)).sum().backward()
    gradients = [parallel.module.weight.grad, cast(DTensor, sharded.weight.grad).full_tensor()]
    return [*began, *(float(value) for gradient in gradients for value in gradient.flatten())]


def _refuse(gradient: torch.Tensor) -> None:
    raise ValueError("no gradient wanted")


def compiles(rank: int, seconds: float) -> float:
    """A sum; before it rank 1 spends these seconds in code whose file is the compiler's."""
    file, names = "/torch/_inductor/compile_fx.py", {"sleep": time.sleep}
    if rank == 1:
        exec(compile("def compile_fx(seconds):\n    sleep(seconds)", file, "exec"), names)
        names["compile_fx"](seconds)
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def forever(rank: int) -> None:
    if rank == 0:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def asks_the_store(rank: int) -> None:
    _get_default_store().get("nothing")


def where(rank: int) -> tuple[int, int, str, str]:
    """Which process was launched for this rank, and what the environment says."""
    return rank, parent_of(os.getppid()), os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Log:
    """Keeps the calls of every rank and the tickets that came back, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Call]] = []
        self.completions: list[tuple[int, int]] = []

    def on_issue(self, rank: int, call: Call) -> int:
        """The ticket is the place in `calls`."""
        self.calls.append((rank, call))
        return len(self.calls) - 1

    def on_completion(self, rank: int, ticket: int) -> None:
        """Only the rank that issued may complete."""
        assert self.calls[ticket][0] == rank
        self.completions.append((rank, ticket))

    def of(self, rank: int) -> list[Call]:
        return [call for issuer, call in self.calls if issuer == rank]
