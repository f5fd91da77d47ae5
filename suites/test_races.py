"""Races: in whatever order ranks run and results arrive, the outcome is the same to the bit, no buffer touched."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engines.engine import Engine
from harness.engines.races import Explored
from harness.exact_checks import same_outcomes
from harness.execution import Execution, execute
from harness.proof import skip_reason
from harness.resolve import resolve
from reference.case import Case
from suites.prover import Prover
from suites.strategies import cases, schedules


@given(data=st.data())
def test_no_schedule_changes_a_bit(prover: Prover, mode: str, data: st.DataObject) -> None:
    if not getattr(prover.engine, "takes_interventions", False):
        pytest.skip(f"engine {prover.engine.name} has the machine's schedule: legal: inproc")
    case = data.draw(cases(mode, prover.worlds, steps=1, layers=1), label="case")
    schedule = data.draw(schedules(), label="schedule")
    if reason := skip_reason(case, resolve(prover.subject), prover.subject):
        hypothesis.note(reason)
        hypothesis.reject()
    plain, explored = _run(prover, case, prover.engine), _run(prover, case, Explored(prover.engine, schedule))
    assert same_outcomes(plain.outcomes, explored.outcomes)
    assert not explored.unwaited


def _run(prover: Prover, case: Case, engine: Engine) -> Execution:
    return execute(case, resolve(prover.subject), engine, text=str(case), record=False)
