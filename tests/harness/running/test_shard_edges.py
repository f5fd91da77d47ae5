"""A range of rows that is one short or one long at the edge of a shard fails on a default case of its mode."""

from __future__ import annotations

import pytest

from harness.checking.checks import CHECKS, examine
from harness.checking.evidence import FAIL
from harness.engines.named import engine_named
from harness.running.trials.runs import recorded
from harness.running.trials.trial import Trial
from harness.subject import named
from reference.case import Case
from reference.case.default_cases import default_cases
from suites.mutants.catalogue import MUTANTS
from suites.mutants.mutant import Mutant

RANGES = [mutant for mutant in MUTANTS if mutant.name.startswith(("table-range-", "label-range-", "last-token-"))]


def verdict(case: Case, subject: object) -> str:
    """What `forward` finds in a recorded run of this case."""
    with engine_named("inproc") as engine:
        evidence = recorded(Trial(case=case, subject=named(subject), engine=engine))  # type: ignore[arg-type]
    return examine(evidence, {"forward": CHECKS["forward"]})["forward"].verdict


@pytest.mark.parametrize(("place", "mutant"), list(enumerate(RANGES)), ids=lambda value: getattr(value, "name", ""))
def test_a_range_one_row_off_fails_a_default_case(place: int, mutant: Mutant) -> None:
    """In one mode each, another one for every mutant; `shardproof faults` plants them in all. Without a bug these cases
    pass: tests/reports/pages/test_default_run.py.
    """
    shown = [case for case in (default_cases([mode])[0] for mode in mutant.modes) if mutant.shows(case)]
    case = shown[place % len(shown)]
    with mutant.subject() as wrong:
        assert verdict(case, wrong) == FAIL, case
