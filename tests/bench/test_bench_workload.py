"""The benchmark workload is right: ranks equal the dense model, with four all_reduces a layer, none in the floor."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.workload import Sizes, data, dense, largest_error, rank_program, weights
from harness.engines.threads.inproc import InprocEngine
from harness.ledger import Call

SIZES = Sizes(layers=2, hidden=16, heads=4, seq=5, batch=3, ffn=32)


class Counts:
    """How often each op was issued, and the payloads."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, int]] = Counter()

    def issued(self, rank: int, call: Call) -> int:
        """Count it."""
        self.calls[call.op, call.payload_bytes] += 1
        return 0

    def completed(self, rank: int, ticket: int) -> None:
        """Nothing to count."""


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_equal_the_dense_model(world_size: int) -> None:
    full, (x, dy), counts = weights(SIZES), data(SIZES), Counts()
    assert len(full) == 24
    with InprocEngine() as engine:
        passed = engine.run(rank_program, world_size, SIZES, full, x, dy, world_size=world_size, observer=counts)
    assert largest_error(passed, dense(SIZES, full, x, dy)) < 1e-12
    assert counts.calls == {("all_reduce", 3 * 5 * 16 * 8): 8 * world_size}


def test_the_floor_runs_without_communication_and_is_therefore_wrong() -> None:
    full, (x, dy) = weights(SIZES), data(SIZES)
    passed = [rank_program(rank, 2, SIZES, full, x, dy, comm=False) for rank in range(2)]
    assert largest_error(passed, dense(SIZES, full, x, dy)) > 1e-3
