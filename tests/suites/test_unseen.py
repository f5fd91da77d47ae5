"""The bugs of the blind measurement can be planted: that they are found is what the measurement is about."""

from __future__ import annotations

import pytest

from reference.case import Case
from suites.mutants.catalogue import UNSEEN
from suites.mutants.mutant import Mutant


@pytest.mark.parametrize("one", UNSEEN, ids=lambda one: one.name)
def test_every_bug_finds_its_lines_and_its_case_can_show_it(one: Mutant) -> None:
    assert one.sources() and one.wrong and one.held_back
    assert one.shows(Case.parse(one.case))
    assert {*one.condition.split()} <= {*one.case.split()}


def test_names_are_unique() -> None:
    assert len({one.name for one in UNSEEN}) == len(UNSEEN) == 30
