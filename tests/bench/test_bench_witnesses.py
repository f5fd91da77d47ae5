"""What a witness costs is the median over rounds: the slower rank's step over the unwatched one of the same round."""

from __future__ import annotations

import pytest

from bench.witnesses import STEPS, WITNESSES, cost_of

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
