"""Races: in whatever order ranks run and results arrive, the outcome is the same to the bit, no buffer touched."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checking.exact_checks import same_outcomes
from harness.engines.races import Explored
from harness.execution import execute
from harness.proof import skip_reason
from harness.resolve import resolve
from suites.prover import Prover
from suites.strategies import cases, schedules


@given(data=st.data())
def test_no_schedule_changes_a_bit(prover: Prover, mode: str, data: st.DataObject) -> None:
    if not getattr(prover.engine, "takes_interventions", False):
        pytest.skip(f"engine {prover.engine.name} has the machine's schedule: legal: inproc")
    case = data.draw(cases(mode, prover.worlds, steps=1, layers=1), label="case")
    schedule = data.draw(schedules(), label="schedule")
    subject: Any = resolve(prover.subject)
    if reason := skip_reason(case, subject, prover.subject):
        hypothesis.note(reason)
        hypothesis.reject()
    engines = prover.engine, Explored(prover.engine, schedule)
    plain, explored = (execute(case, subject, engine, text=str(case), record=False) for engine in engines)
    assert same_outcomes(plain.outcomes, explored.outcomes)
    assert not explored.unwaited
