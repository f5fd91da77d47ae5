"""The benchmark workload is right, a witness costs the median over rounds, and pairs of recorded steps are timed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest

from bench.witnesses import STEPS, WITNESSES, cost_of
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


OFF = [(2.0, 1.0), (4.0, 2.0)]
"""Seconds by the clock and of CPU, one pair a round."""


@pytest.mark.parametrize("witness", WITNESSES)
def test_costs_are_medians_of_the_rounds_own_ratios_on_the_slower_rank(witness: str) -> None:
    ranks = [{"off": OFF, witness: [(3.0, 4.0), (9.0, 3.0)]}, {"off": OFF, witness: [(5.0, 1.0), (4.0, 1.0)]}]
    cost = cost_of(ranks, witness, events=10)
    # Slower rank by round: clock 5 and 9, CPU 4 and 3; unwatched 2 and 4, CPU 1 and 2.
    assert (cost.by_clock, cost.by_cpu) == ((5 / 2 + 9 / 4) / 2, (4 / 1 + 3 / 2) / 2)
    # What is added in STEPS steps, over 10 events a step.
    assert (cost.clock_us, cost.cpu_us) == (4e6 / STEPS / 10, 2e6 / STEPS / 10)
    assert cost.seconds == (5 + 9) / 2 / STEPS


def test_pairs_of_steps_are_timed_and_their_calls_recorded() -> None:
    tiny = "cost.LAYERS, cost.HIDDEN, cost.HEADS, cost.VOCAB, cost.SEQ = 1, 8, 2, 11, 4"
    code = f"from bench import proof_costs as cost; {tiny}; cost.main(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    seconds = json.loads(done.stdout)
    assert [len(seconds[name]) for name in ("off", "on")] == [3, 3]
    assert min(seconds["on"]) > 0
