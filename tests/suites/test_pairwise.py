"""A few draws of any property have every pair of values of every two boolean words, and every property has its own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from reference.language.modes import MODES
from suites.drawing.pairwise import rows
from suites.drawing.strategies import cases
from suites.session.prover import Prover


@pytest.mark.parametrize("mode", MODES)
def test_the_rows_have_every_pair_that_a_case_can_have(mode: str) -> None:
    words = tuple(rows(mode)[0])
    assert len(rows(mode)) <= 8
    for one, other in itertools.combinations(words, 2):
        seen = {(row[one], row[other]) for row in rows(mode)}
        impossible = {(True, True)} if {one, other} == {"packed", "attention_mask"} else set()
        assert seen == set(itertools.product((False, True), repeat=2)) - impossible, (one, other)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=10, database=None, phases=(Phase.generate,))
@given(data=st.data())
def test_a_case_has_the_words_of_its_row(mode: str, data: st.DataObject) -> None:
    for row in rows(mode):
        case = data.draw(cases(mode, flags=row))
        meant = {word: value for word, value in row.items() if not (word == "attention_mask" and case.packed)}
        assert {word: getattr(case, word) for word in meant} == meant


def _ten_draws(prover: Prover, mode: str) -> list[Any]:
    drawn: list[Any] = []

    @settings(max_examples=10, database=None, phases=(Phase.generate,))
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        drawn.append(prover.drawn(data, mode))

    draw()
    return drawn


def test_ten_draws_of_a_property_meet_every_row_and_another_property_draws_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Prover.on("parallel.subject:subject", "2,3,4,6") as prover:
        first: list[Any] = []
        for name in ("suites/test_a.py::test_a[isp] (call)", "suites/test_b.py::test_b[isp] (call)"):
            monkeypatch.setenv("PYTEST_CURRENT_TEST", name)
            drawn = _ten_draws(prover, "isp")
            first.append(drawn[0])
            for row in rows("isp"):
                assert any(all(getattr(case, word) == value for word, value in row.items()) for case in drawn), row
    assert first[0] != first[1]
