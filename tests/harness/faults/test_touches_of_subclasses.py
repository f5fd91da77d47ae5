"""What reads a result through a tensor without memory of its own: DTensor, a functional collective under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.engines.faults.touches import Touches
from harness.engines.threads.inproc import InprocEngine
from harness.engines.threads.intervention import Intervened


def _touched(program: Any) -> set[int]:
    """The call indices of rank 0 whose results are read before the next call, or that are the last."""
    touches = Touches()

    def on_rank(rank: int) -> None:
        with touches.on_rank(rank):
            program(init_device_mesh("cpu", (2,)))

    with InprocEngine() as engine:
        Intervened(engine, touches).run(on_rank, world_size=2)
    return {index for rank, index in touches.touched if rank == 0}


def test_an_operator_on_a_dtensor_reads_the_memory_of_its_part() -> None:
    def program(mesh: Any) -> None:
        part, other = torch.ones(2, 3), torch.ones(2)
        whole = DTensor.from_local(part, mesh, [Replicate()], run_check=False)
        dist.all_reduce(part)
        whole.sum()
        dist.all_reduce(part)  # nobody reads it before the next call
        dist.all_reduce(other)

    assert _touched(program) == {0, 2}


@pytest.mark.filterwarnings("ignore")
def test_a_pending_result_is_read_by_its_first_use_and_a_redistribution_by_the_operator_behind_it() -> None:
    def program(mesh: Any) -> None:
        world: Any = dist.group.WORLD
        functional.all_reduce(torch.ones(2, 3), "sum", world) + 1
        split = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        split.redistribute(mesh, [Replicate()]) * 2
        unread = functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", world))
        dist.all_reduce(torch.ones(2))
        unread + 1

    assert _touched(program) == {0, 1, 3}
