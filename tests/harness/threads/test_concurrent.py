"""Ranks at the same time: crossing groups, the time limit, and what needs turns."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.engines.threads.concurrent import ConcurrentEngine
from harness.errors import TimeLimit


@pytest.fixture(scope="module")
def together() -> Iterator[ConcurrentEngine]:
    with ConcurrentEngine() as engine:
        yield engine


def test_ranks_are_inside_their_code_at_the_same_time(together: ConcurrentEngine) -> None:
    met = threading.Barrier(3, timeout=10)
    assert sorted(together.run(lambda rank: met.wait(), world_size=3)) == [0, 1, 2]


def test_many_calls_in_crossing_groups_add_up_every_time(together: ConcurrentEngine) -> None:
    def program(rank: int) -> Tensor:
        rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
        columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
        x = torch.tensor([float(rank)])
        total = torch.zeros(1)
        for _ in range(20):
            y, z = x.clone(), x.clone()
            works = [dist.all_reduce(y, group=rows, async_op=True), dist.all_reduce(z, group=columns, async_op=True)]
            for work in works if rank % 2 else reversed(works):
                work.wait()
            total += y + z
            peer = torch.zeros(1)
            for request in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x, (rank + 1) % 4), dist.P2POp(dist.irecv, peer, (rank - 1) % 4)]
            ):
                request.wait()
            total += peer
        return total

    # rows 0+1, 2+3; columns 0+2, 1+3; the neighbour before: 20 (1+2+3), 20 (1+4+0), 20 (5+2+1), 20 (5+4+2)
    for _ in range(15):
        assert torch.cat(together.run(program, world_size=4)).tolist() == [120, 100, 160, 220]


def test_a_rank_that_does_not_end_is_told_and_the_engine_serves_on(together: ConcurrentEngine) -> None:
    with pytest.raises(TimeLimit, match="rank 0 runs at "):
        together.run(lambda rank: endless() if rank == 0 else dist.barrier(), world_size=2, timeout_s=0.2)
    assert together.run(lambda rank: rank, world_size=3) == [0, 1, 2]


def endless() -> None:
    while True:
        time.sleep(0.001)


def test_the_callers_streams_and_processors_are_as_before(together: ConcurrentEngine) -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    together.run(lambda rank: torch.rand(3), world_size=2)
    assert torch.equal(torch.rand(1), expected)
    if sys.platform == "linux":
        everywhere = os.sched_getaffinity(0)
        assert together.run(lambda rank: os.sched_getaffinity(0), world_size=2) == [everywhere] * 2
