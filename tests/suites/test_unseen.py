"""The bugs of the blind measurement can be planted: that they are found is what the measurement is about."""

from __future__ import annotations

import pytest

from reference.case import Case
from suites.mutants.unseen import UNSEEN, Unseen


@pytest.mark.parametrize("one", UNSEEN, ids=lambda one: one.mutant.name)
def test_every_text_to_change_occurs_once_and_the_case_can_show_it(one: Unseen) -> None:
    assert one.mutant.sources()
    assert one.mutant.shows(Case.parse(one.case))
    assert {*one.needed} <= {*one.case.split()}


def test_names_are_unique() -> None:
    assert len({one.mutant.name for one in UNSEEN}) == len(UNSEEN)
