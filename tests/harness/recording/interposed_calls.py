"""Every way to communicate that torch offers, as scenarios that two gloo ranks run under the interposer.

A scenario is a function of the rank. Tensors are float32 of four elements unless said.
"""

import datetime
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_group
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.engines.interposer import Interposer
from shardproof.harness.recording.recorder import Recorder

RANKS = 2


def x4() -> Tensor:
    return torch.ones(4)


def reductions(rank: int) -> None:
    """all_reduce: plain, asynchronous, of another op, of bfloat16, a number in a group of one, a view of a bucket."""
    dist.all_reduce(x4())
    work = dist.all_reduce(x4(), op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    dist.all_reduce(x4().bfloat16(), op=dist.ReduceOp.PRODUCT)
    alone = [dist.new_group([other], group_desc=f"alone{other}") for other in range(RANKS)]
    dist.all_reduce(torch.tensor(1.0), group=alone[rank])
    dist.all_reduce(torch.ones(1000)[2:12])


def rooted(rank: int) -> None:
    dist.broadcast(x4(), src=1)
    dist.reduce(x4(), dst=1, op=dist.ReduceOp.MIN)
    parts = [x4() for _ in range(RANKS)] if rank == 1 else None
    dist.gather(x4(), parts, dst=1)
    dist.scatter(x4(), parts, src=1)


def gathers(rank: int) -> None:
    """all_gather and reduce_scatter, as lists and as single tensors, once of views of a bucket."""
    dist.all_gather([x4() for _ in range(RANKS)], x4())
    dist.all_gather_into_tensor(torch.empty(1000)[:8], torch.ones(1000)[100:104])
    dist.reduce_scatter(x4(), [x4() for _ in range(RANKS)])
    dist.reduce_scatter_tensor(x4(), torch.ones(8))


def exchanges(rank: int) -> None:
    """all_to_all, single, uneven and as lists."""
    dist.all_to_all_single(x4(), x4())
    sends, receives = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    dist.all_to_all_single(torch.empty(sum(receives)), x4(), receives, sends)
    dist.all_to_all([x4() for _ in range(RANKS)], [x4() for _ in range(RANKS)])


def messages(rank: int) -> None:
    """Call send and recv: blocking, not blocking, from any rank, as a batch."""
    other = 1 - rank
    if rank == 0:
        dist.send(x4(), dst=1)
        dist.isend(x4(), dst=1).wait()  # type: ignore[union-attr]
        dist.send(x4(), dst=1)
    else:
        dist.recv(x4(), src=0)
        dist.irecv(x4(), src=0).wait()  # type: ignore[union-attr]
        dist.recv(x4())
    batch = [dist.P2POp(dist.isend, x4(), other), dist.P2POp(dist.irecv, x4(), other)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()


def barriers(rank: int) -> None:
    dist.barrier()
    dist.monitored_barrier()


def coalesced(rank: int) -> None:
    """Several tensors in one call: two APIs."""
    dist.all_reduce_coalesced([x4(), torch.ones(2, 3)])
    with _coalescing_manager():
        dist.all_reduce(x4())
        dist.all_reduce(torch.ones(2))
    with _coalescing_manager():
        dist.all_gather_into_tensor(torch.empty(8), x4())
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))


def objects(rank: int) -> None:
    """Collectives of Python objects: a size, then the bytes."""
    dist.all_gather_object([None] * RANKS, "abc")
    dist.broadcast_object_list(["abc"], src=0)


def functionals(rank: int) -> None:
    """Functional collectives, with and without autograd, in place, and issued as operators."""
    world = _get_default_group()
    functional.all_reduce(x4(), "sum", world).sum()
    functional.all_gather_tensor(x4(), 0, world).sum()
    functional.reduce_scatter_tensor(torch.ones(8), "max", 0, world).sum()
    functional.all_to_all_single(x4(), None, None, world).sum()
    functional.broadcast(x4(), 0, world).sum()
    for reduced in functional.all_reduce_coalesced([x4(), torch.ones(2)], "sum", world):
        reduced.sum()
    leaf = torch.ones(8, requires_grad=True)
    functional.reduce_scatter_tensor_autograd(leaf, "sum", 0, world).sum().backward()
    torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_reduce_(x4(), "sum", _get_default_group().group_name)
    )


def elsewhere(rank: int) -> None:
    """From another thread, in inference mode, on the group object itself."""
    thread = threading.Thread(target=dist.all_reduce, args=(x4(),))
    thread.start()
    thread.join()
    with torch.inference_mode():
        dist.all_reduce(x4())
    _get_default_group().allreduce([x4()]).wait()


def ddp(rank: int) -> list[Tensor]:
    """Three steps of DDP: its reducer is C++."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def fsdp(rank: int) -> None:
    """Step of FSDP2, every layer its own group of parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    optimizer.step()


def compiled(rank: int) -> None:
    compiled_sum = torch.compile(
        lambda x: functional.all_reduce(x * 2, "sum", _get_default_group()) + 1, backend="aot_eager"
    )
    for _call in range(2):
        compiled_sum(x4())


_ALL = (reductions, rooted, gathers, exchanges, messages, barriers, coalesced, objects, functionals, elsewhere)
SCENARIOS: dict[str, Callable[[int], Any]] = {one.__name__: one for one in (*_ALL, ddp, fsdp, compiled)}


def on_rank(rank: int, folder: Path) -> None:
    """Run every scenario on a rank; what it saw is pickled to `folder/rank<r>`.

    By scenario: its events; "bare" and "ddp results": DDP's parameters unrecorded and recorded; "after": events of
    calls made when the interposer was gone.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = torch._C._distributed_c10d.FileStore(str(folder / "store"), RANKS)
    limit = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    results: dict[str, Any] = {"bare": ddp(rank)}
    for name, scenario in SCENARIOS.items():
        with Recorder("", "tp", RANKS, {"tp": ((0, 1),)}) as recorder, recorder.on_rank(rank), Interposer(recorder):
            outcome = scenario(rank)
        results[name] = recorder.events()
        if name == "ddp":
            results["ddp results"] = outcome
    reductions(rank)
    results["after"] = recorder.events()[len(results[name]) :]
    (folder / f"rank{rank}").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
