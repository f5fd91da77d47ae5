"""Groups, meshes, and the life of torch.distributed's world on the ranks of the in-process engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group, split_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness.engines.threads.inproc import InprocEngine
from harness.errors import RankRaised


def summed(group: dist.ProcessGroup | None) -> float:
    tensor = torch.tensor([float(2 ** dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_groups_made_by_members_alone(engine: InprocEngine) -> None:
    def program(rank: int) -> float:
        ranks = [0, 1] if rank < 2 else [2, 3]
        return summed(dist.new_group(ranks, use_local_synchronization=True))

    assert engine.run(program, world_size=4) == [3, 3, 12, 12]


def test_split_groups_count_ranks_within_the_parent(engine: InprocEngine) -> None:
    def program(rank: int) -> tuple[float, float | None]:
        half = split_group(split_ranks=[[0, 2], [1, 3]])
        single = split_group(half, [[1]], group_desc="second")
        return summed(half), None if single is None else summed(single)

    assert engine.run(program, world_size=4) == [(5, None), (10, None), (5, 4), (10, 8)]


def test_a_wrong_split_is_refused_with_the_rule(engine: InprocEngine) -> None:
    with pytest.raises(RankRaised) as caught:
        engine.run(lambda rank: split_group(split_ranks=[[0, 5]]), world_size=2)
    rule = "must be lists of distinct ranks below 2, none of them empty; legal: [[0], [1]]"
    text = f"split_group split_ranks=[[0, 5]]: {rule}"
    assert isinstance(caught.value.__cause__, ValueError) and str(caught.value.__cause__) == text


def test_meshes_and_sharding_decisions_are_made_anew_in_every_run(engine: InprocEngine) -> None:
    """Group names count from 0 in every run: a mesh remembered from the first run would talk in the wrong group."""

    def program(rank: int, first: list[int]) -> float:
        dist.new_group(first)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = distribute_tensor(torch.arange(8.0), mesh["b"], [Shard(0)])
        return float((x * 2).sum().full_tensor())  # type: ignore[attr-defined]

    for first in ([0, 3], [1, 2], [0, 1, 2]):
        assert engine.run(program, first, world_size=4) == [56.0] * 4


def test_meshes_of_different_ranks_are_told_apart_where_shards_are_uneven(engine: InprocEngine) -> None:
    """torch keeps what a redistribution does in tables of the process, which the meshes of all ranks would share."""
    full = torch.arange(35.0).view(5, 7)

    def program(rank: int) -> tuple[bool, ...]:
        mesh = init_device_mesh("cpu", (2, 2))
        there = distribute_tensor(full, mesh, [Shard(0), Shard(0)]).redistribute(mesh, [Shard(1), Replicate()])
        back = there.redistribute(mesh, [Shard(0), Shard(1)])
        return torch.equal(there.full_tensor(), full), torch.equal(back.full_tensor(), full)

    assert engine.run(program, world_size=4) == [(True, True)] * 4


def test_user_code_may_initialise_and_destroy_the_world_itself(engine: InprocEngine) -> None:
    def program(rank: int) -> list[Any]:
        init_process_group("nccl", world_size=2, rank=rank)
        first = summed(None)
        destroy_process_group()
        gone = dist.is_initialized()
        dist.init_process_group(init_method="env://")
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        return [first, gone, summed(None), dist.get_rank()]

    assert engine.run(program, world_size=2) == [[3, False, 3, 0], [3, False, 3, 1]]
