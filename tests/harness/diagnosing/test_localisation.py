"""Planted bugs are traced to their first place and cause: one of every kind that needs a rule of its own.

Whether that holds for the whole catalogue of mutants is the kill matrix's business; here each rule is seen to work.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bugs.planting import planted
from harness.engines.engine import Engine
from harness.engines.named import engine_named
from harness.running.proof import prove
from reference.case import Case
from suites.mutants.catalogue import of_file
from suites.mutants.mutant import Mutant


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_named("inproc") as engine:
        yield engine


@pytest.mark.parametrize("bug", of_file("tests/localised"), ids=lambda bug: bug.name)
def test_a_planted_bug_is_traced_to_its_place_and_cause(bug: Mutant, engine: Engine) -> None:
    diagnosis = prove(Case.parse(bug.case), planted(bug.sources()), engine).diagnosis
    assert diagnosis is not None
    assert (diagnosis.first.phase, diagnosis.first.region) == (bug.phase, bug.region)
    assert not bug.cause or bug.cause in {told.id for told in diagnosis.causes}
