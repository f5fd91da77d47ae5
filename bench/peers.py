"""Torch's own ways to run ranks without processes, on the workload of `bench.workload`.

    threaded group   torch.testing._internal.distributed.multi_threaded_pg: a thread for each rank, as torch's tests do
    LocalTensor      torch.distributed._local_tensor: one program, each of whose tensors holds the parts of all ranks

LocalTensorMode calls no rank: the rank program runs once, with LocalTensors as its shards. Both are private parts of
torch, so they are imported where they are used: without one of them, only its workload fails.
"""

from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bench.workload import Passed, Sizes, rank_program, run_pass, shard
from shardproof.harness.torch_internals.backends import fake_store

Peer = Callable[[int, Sizes, dict[str, Tensor], Tensor, Tensor], list[Passed]]
"""Runs the workload on so many ranks and returns the results of all of them."""
_Result = TypeVar("_Result")


def threaded_ranks(
    world_size: int, sizes: Sizes, full: dict[str, Tensor], x_BSH: Tensor, dy_BSH: Tensor
) -> list[Passed]:
    """The results of all ranks in threads of torch's threaded process group. Raises what a rank raised first."""
    return in_threaded_group(lambda rank: rank_program(rank, world_size, sizes, full, x_BSH, dy_BSH), world_size)


def in_threaded_group(program: Callable[[int], _Result], world_size: int) -> list[_Result]:
    """What `program(rank)` returns on every rank of torch's threaded process group. Raises what a rank raised first."""
    from torch.testing._internal.distributed import multi_threaded_pg  # noqa: PLC0415 (registers a backend)

    registry: Any = torch._C._distributed_c10d
    results: dict[int, _Result] = {}
    raised: list[BaseException] = []
    store = dist.HashStore()

    def run_rank(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = program(rank)
            dist.destroy_process_group()
        except BaseException as error:
            raised.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)  # ends the waits of the other ranks

    registry._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    try:
        threads = [Thread(target=run_rank, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
        registry._set_thread_isolation_mode(False)
    if raised:
        raise raised[0]
    return [results[rank] for rank in range(world_size)]


def local_tensor_ranks(
    world_size: int, sizes: Sizes, full: dict[str, Tensor], x_BSH: Tensor, dy_BSH: Tensor
) -> list[Passed]:
    """The results of all ranks, run as one program whose tensors are LocalTensors."""
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode, rank_map  # noqa: PLC0415 (a torch without it refuses)

    def of_rank(tensor: Tensor, rank: int) -> Tensor:
        return tensor._local_tensors[rank] if isinstance(tensor, LocalTensor) else tensor

    dist.init_process_group("fake", rank=0, world_size=world_size, store=fake_store())
    try:
        with LocalTensorMode(world_size):
            part_of = {name: partial(shard, name, weight, world_size=world_size) for name, weight in full.items()}
            shards = {name: rank_map(part) for name, part in part_of.items()}
            x, dy = rank_map(lambda _: x_BSH), rank_map(lambda _: dy_BSH)
            passed = run_pass(sizes, shards, x, dy, world_size=world_size)
    finally:
        dist.destroy_process_group()
    return [
        Passed(
            of_rank(passed.y_BSH, rank),
            of_rank(passed.dx_BSH, rank),
            {name: of_rank(gradient, rank) for name, gradient in passed.gradients.items()},
        )
        for rank in range(world_size)
    ]


PEERS: dict[str, Peer] = {"torch's threaded group": threaded_ranks, "LocalTensorMode": local_tensor_ranks}
