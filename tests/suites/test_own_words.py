"""The suites, the faults and the commands on a subject of its own words and truth: right ones pass, wrong ones fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.errors import RequestError
from harness.plain_case import PlainCase
from harness.subject import cases_of, named
from suites.drawing.own_cases import around
from suites.session.prover import Prover
from tests.harness.own_words import Network, subject
from tests.suites.test_plugin_requests import outside

__all__ = ["outside"]

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.usefixtures("loaded")

OWN = "tests.harness.own_words:"


def test_every_suite_passes(outside: Callable[..., pytest.RunResult]) -> None:
    tests = [f"suites.test_{name}" for name in ("forward", "training", "races", "equivalence", "communication")]
    result = outside(*tests, "--subject", f"{OWN}subject", "--modes", "dp+tp")
    result.assert_outcomes(passed=4, skipped=1)


def test_a_property_of_a_word_that_the_subject_lacks_is_skipped() -> None:
    lacking = pytest.raises(pytest.skip.Exception, match="cases of .*:subject have no word optimizer")
    with Prover.on(f"{OWN}subject", "2,3,6") as prover, lacking:
        prover.drawn(None, "dp+tp", optimizer="adamw")  # type: ignore[arg-type]


class Split(Network):
    """The same over tp alone."""

    cases: Any = ("tp=2",)

    def refuses(self, case: Any) -> str:
        return "has no data ranks" if case.dp > 1 else ""


split = Split()


def test_a_subject_without_data_ranks_has_no_other_grouping(outside: Callable[..., pytest.RunResult]) -> None:
    result = outside("suites.test_regrouping", "--subject", "tests.suites.test_own_words:split", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*no case that *:split names has data ranks (dp > 1)"])


def test_a_wrong_one_fails_and_is_repeated_with_its_truth(outside: Callable[..., pytest.RunResult]) -> None:
    words = ("--subject", f"{OWN}doubled", "--truth", f"{OWN}truth", "--case", "tp=2 dp=3 act=tanh")
    result = outside("suites.test_forward", *words)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ['*repeat: shardproof run "tp=2 dp=3 act=tanh" --subject tests.harness.own_words:doubled --truth *:truth']
    )


def _drawn(subject_: Any, mode: str, **fixed: Any) -> list[PlainCase]:
    found: list[PlainCase] = []

    @settings(max_examples=30, database=None, phases=(Phase.generate,), suppress_health_check=tuple(HealthCheck))
    @given(case=around(named(subject_), mode, fixed))
    def draw(case: PlainCase) -> None:
        found.append(case)

    draw()
    return found


def test_cases_are_drawn_around_those_that_the_subject_names() -> None:
    drawn = _drawn(subject, "tp", steps=2)
    assert {(case.tp, case.dp, case.act, case.dtype, case.steps) for case in drawn} == {(3, 1, "tanh", "float32", 2)}
    assert len({case.seed for case in drawn}) > 5 and {case.micro for case in drawn} == {1, 2, 3}
    assert {case.act for case in _drawn(subject, "dp+tp")} == {"relu", "tanh"}


class Drawing(Network):
    """Has a strategy of its own."""

    @staticmethod
    def draws() -> st.SearchStrategy[PlainCase]:
        """tp of any size."""
        texts = [f"tp={tp} dp={dp}" for tp in (2, 3, 4) for dp in (1, 2)]
        return st.sampled_from([case for case in cases_of(texts, named(subject)) if isinstance(case, PlainCase)])


def test_a_strategy_of_its_own_is_drawn_from() -> None:
    assert {(case.tp, case.dp, case.steps) for case in _drawn(Drawing(), "tp", steps=3)} == {
        (tp, 1, 3) for tp in (2, 3, 4)
    }


def test_a_strategy_that_is_none_is_a_wrong_request() -> None:
    wrong = Network()
    wrong.draws = 3  # type: ignore[attr-defined]
    with pytest.raises(RequestError, match="draws=3 must be a hypothesis strategy"):
        around(named(wrong), "tp", {})
