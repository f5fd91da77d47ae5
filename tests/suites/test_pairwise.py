"""What a property draws: every pair of values of two boolean words in a few draws, and what fails shrinks.

A failure is repeated on its own: one case instead of drawn ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from reference.case import Case
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


pytest_plugins = ("pytester",)

PROPERTY = """
from hypothesis import given
from hypothesis import strategies as st

@given(data=st.data())
def test_it(prover, mode, data):
    prover.holds(prover.drawn(data, mode), "parameter_gradients")
"""
CASE = "mode=msp layers=1 heads=4 hidden=16 ffn=16 vocab=264 seq=8 micro=1 steps=1"


@pytest.fixture
def session(
    loaded: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., pytest.RunResult]:
    """A session of its own with one property."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest("from suites.conftest import *  # noqa: F403")
    pytester.makepyfile(test_property=PROPERTY)
    return lambda *words: pytester.runpytest_inprocess("-p", "no:xdist", "-p", "no:cacheprovider", *words)


def test_a_case_that_is_given_is_proved_in_place_of_drawn_ones(session: Callable[..., pytest.RunResult]) -> None:
    wrong = f"{CASE} variant=norm-average"
    result = session("--case", wrong)
    result.assert_outcomes(failed=1)
    text = str(Case.parse(wrong))
    result.stdout.fnmatch_lines([f'*repeat: shardproof run "{text}" --subject parallel.subject:subject'])


def test_a_case_that_is_none_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from suites.conftest import *  # noqa: F403")
    pytester.makepyfile("def test_it(mode): assert mode")
    result = pytester.runpytest_inprocess("-p", "no:xdist", "-p", "no:cacheprovider", "--case", "mode=tq")
    assert result.ret in {pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR}
    assert "mode=tq" in result.stdout.str() + result.stderr.str()


Wrong = Callable[[Case], bool]
ALWAYS: Wrong = lambda case: True  # noqa: E731
SMALLEST = {"tp": 2, "dp": 1, "layers": 1, "micro": 3, "steps": 2, "batch": 2, "seed": 0, "label_smoothing": 0.0}


@pytest.mark.parametrize(
    ("wrong", "left"),
    [
        (ALWAYS, {}),
        (lambda case: case.dp > 1, {"tp": 2, "dp": 3, "micro": 4}),
        (lambda case: case.tp > 2, {"tp": 3, "micro": 2}),
        (lambda case: case.layers > 1, {"layers": 2}),
        (lambda case: case.micro > 2 and case.qk_norm, {"qk_norm": True}),
    ],
    ids=["anywhere", "data ranks", "three ranks", "two layers", "normalised heads"],
)
def test_what_is_drawn_shrinks_to_the_smallest_mesh_depth_and_batch(wrong: Wrong, left: dict[str, object]) -> None:
    """As if a bug showed wherever `wrong` says so."""
    plain = settings(max_examples=300, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    case = find(cases("isp"), wrong, settings=plain)
    expected = {**SMALLEST, **left}
    assert {word: getattr(case, word) for word in expected} == expected
