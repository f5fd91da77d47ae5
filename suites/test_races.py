"""Races: in whatever order ranks run and results arrive, the outcome is the same to the bit, and no wait is missing."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.harness.checking.repeats import same_outcomes
from shardproof.harness.engines.faults.races import Explored
from shardproof.harness.running.ranks.execution import execute
from shardproof.suites.drawing.strategies import schedules
from shardproof.suites.session.prover import Prover

EXAMPLES = max(1, 3 * settings().max_examples // 8)
"""A case is run twice, and each of its layers meets the schedule, so fewer are drawn."""


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_no_schedule_changes_a_bit(prover: Prover, mode: str, data: st.DataObject) -> None:
    if not getattr(prover.engine, "takes_interventions", False):
        pytest.skip(f"engine {prover.engine.name} has the machine's schedule: legal: inproc")
    layers = data.draw(st.integers(2, 3), label="layers")  # what one layer leaves in flight, the next one meets
    case = prover.draw_case(data, mode, steps=1, where_known={"layers": layers, "micro": 2})
    schedule = data.draw(schedules(), label="schedule")
    subject: Any = prover.subject.call
    engines = prover.engine, Explored(prover.engine, schedule)
    plain, explored = (
        execute(case, subject, engine, text=str(case), record=False, timeout_s=prover.timeout_s) for engine in engines
    )
    assert same_outcomes(plain.outcomes, explored.outcomes)
    assert not explored.unwaited
