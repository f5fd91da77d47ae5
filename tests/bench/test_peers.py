"""torch's own ways to run ranks without processes compute the workload of the benchmark, or a row says why not."""

import math

import pytest
import torch
import torch.distributed as dist

from bench.peers import PEERS, in_threaded_group
from bench.performance import engine_rows
from bench.workload import Passed
from shardproof.harness.engines.threads.inproc import InprocEngine


def sends(world_size: int, *_workload: object) -> list[Passed]:
    """Messages, which torch's threaded group has not."""
    in_threaded_group(lambda rank: dist.send(torch.ones(2), 1 - rank), world_size)
    raise AssertionError("the group sent a message")


@pytest.mark.filterwarnings("error")
def test_the_engine_has_rows_beside_its_peers_and_a_peer_that_cannot_run_says_what_it_refuses(
    engine: InprocEngine,
) -> None:
    rows = {row.metric: row for row in engine_rows(engine, 2, 1, PEERS | {"sender": sends})}
    assert list(rows) == ["engine, 2 ranks", *(f"{name}, 2 ranks" for name in PEERS), "sender, 2 ranks"]
    measured = [row for row in rows.values() if row.versus == "bare ranks"]
    assert len(measured) == 1 + len(PEERS) and all(row.value > 0 and row.ratio > 0 for row in measured)
    assert math.isnan(rows["sender, 2 ranks"].value)
    assert rows["sender, 2 ranks"].versus == "refuses it: No backend type associated with device type cpu"
    assert engine.run(lambda rank: rank, world_size=2) == [0, 1]  # the world is as it was
