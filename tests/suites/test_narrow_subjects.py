"""Subjects that take few of the cases that are drawn, or none; and one case that every suite proves or skips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from harness.subject import Unanswered
from parallel.subject import subject
from reference.case import Case
from suites.session.prover import Prover
from suites.test_engines import compared
from suites.test_training import OPTIMIZERS
from tests.suites.test_plugin_requests import CASE, outside

__all__ = ["outside"]

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.usefixtures("loaded")

ME = "tests.suites.test_narrow_subjects:"
EVERY = ("forward", "backward", "training", "consistency", "communication", "races", "equivalence", "engines")
PROVED: list[str] = []
"""The cases that a subject of this module was given."""


class Narrow:
    """Ours, in one architecture; whatever else a case says is refused."""

    modes = ("tp",)

    def __init__(self, reason: Callable[[Case], str]) -> None:
        self.refuses = reason

    def __call__(self, case: Case, device: torch.device) -> Mapping[str, Any]:
        """Our own outcome."""
        PROVED.append(str(case))
        return subject(case, device)


def _no_words(case: Case) -> str:
    raise LookupError("no words")


one = Narrow(lambda case: "" if (case.heads, case.hidden, case.dp) == (8, 64, 1) else "built for 8 heads of 8")
none = Narrow(lambda case: "built for 405b")
speechless = Narrow(_no_words)
lenient = Narrow(lambda case: "")


def test_a_subject_of_one_architecture_is_proved_on_its_default_cases(outside: Callable[..., pytest.RunResult]) -> None:
    PROVED.clear()
    result = outside("suites.test_training", "--subject", f"{ME}one", "--worlds", "2,4")
    result.assert_outcomes(passed=1)
    proved = [Case.parse(text) for text in set(PROVED)]
    assert {(case.heads, case.hidden, case.dp) for case in proved} == {(8, 64, 1)}
    fixed = {(words["optimizer"], words["lr"], words["clip"]) for words in OPTIMIZERS}
    drawn = {(case.optimizer, case.lr, case.clip) for case in proved}
    assert drawn <= fixed and len(drawn) > 1, "the words that the property fixes"
    assert len({case.seed for case in proved}) > 5, "other data in every example"


def test_a_subject_that_takes_nothing_is_skipped_with_its_reason(outside: Callable[..., pytest.RunResult]) -> None:
    tests = [f"suites.test_{name}" for name in ("communication", "races", "engines")]
    result = outside(*tests, "--subject", f"{ME}none", "-rs")
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines_random(
        ["SKIPPED*: *none takes none of * cases drawn and none of its default cases; the last: built for 405b; *"]
    )
    assert result.stdout.str().count("built for 405b") >= 2


def test_a_refusal_that_raises_is_no_skip() -> None:
    with Prover.on(f"{ME}speechless", "2") as prover, pytest.raises(Unanswered, match="LookupError: no words"):
        prover.fitting(Case.parse(CASE))


def test_every_suite_proves_the_one_case_or_says_why_not(outside: Callable[..., pytest.RunResult]) -> None:
    PROVED.clear()
    tests = [f"suites.test_{name}" for name in EVERY if name != "engines"]
    result = outside(*tests, "--subject", f"{ME}lenient", "--case", CASE, "-rs")
    result.assert_outcomes(passed=6, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*claims tp alone, so there is no mode to compare it with"])
    assert set(PROVED) == {str(Case.parse(CASE))}
    with Prover.on(f"{ME}lenient", "2", case=CASE) as prover:
        assert compared(prover) == [Case.parse(CASE)], "the engines'"
    large = CASE.replace("tp=2", "tp=2 dp=4")
    with Prover.on(f"{ME}lenient", "2", case=large) as prover, pytest.raises(pytest.skip.Exception, match="8 ranks"):
        compared(prover)
    refused = outside(*(f"suites.test_{name}" for name in EVERY), "--subject", f"{ME}one", "--case", CASE, "-rs")
    refused.assert_outcomes(skipped=8)


def test_a_stored_ledger_is_held_for_what_the_subject_takes(outside: Callable[..., pytest.RunResult]) -> None:
    words = ("suites.test_ledger", "--subject", f"{ME}one", "--ledger-baseline", "ledgers")
    stored = outside(*words, "--update-ledgers")
    held = stored.parseoutcomes()["passed"]
    assert held > 0, "default cases are those that it takes"
    stored.assert_outcomes(passed=held)
    outside(*words).assert_outcomes(passed=held)
