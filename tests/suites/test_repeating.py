"""A failure is repeated on its own: one case instead of drawn ones, and drawn ones shrink to the smallest that fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, find, settings

from reference.case import Case
from suites.drawing.strategies import cases

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
