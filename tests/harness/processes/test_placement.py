"""Ranks that are more than processors stay on one each, in turn; others are free. The driver is never placed."""

from __future__ import annotations

import os

import pytest

from harness.engines.processes.forked.cpu_affinity import share
from harness.engines.processes.forked.pool import PoolEngine


def place(_rank: int) -> tuple[set[int], set[int]]:
    """Where this rank runs: its main thread, and all its threads."""
    threads = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
    return os.sched_getaffinity(0), set().union(*threads)


def test_ranks_take_processors_in_turn_when_there_are_not_more() -> None:
    assert [share({4, 9}, rank, 4) for rank in range(4)] == [{4}, {9}, {4}, {9}]
    assert [share({4, 9}, rank, 2) for rank in range(2)] == [{4}, {9}]


def test_ranks_are_free_where_processors_are_more() -> None:
    assert share({0, 3, 7}, 1, 2) == {0, 3, 7}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not place processes")
def test_the_ranks_of_a_pool_are_placed_and_its_driver_is_not(pool: PoolEngine) -> None:
    before = os.sched_getaffinity(0)
    worlds = (2, 1) if len(before) > 1 else (2,)
    for world_size in worlds:  # processes are used again, as ranks of another world
        found = pool.run(place, world_size=world_size)
        assert found == [(share(before, rank, world_size),) * 2 for rank in range(world_size)]
    assert os.sched_getaffinity(0) == before
