"""The suites on subjects of own words and truth, and on those that take few of the cases that are drawn, or none."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from shardproof.harness.errors import RequestError
from shardproof.harness.plain_case import PlainCase
from shardproof.harness.subject import Unanswered, cases_of, resolve_subject
from shardproof.parallel.subject import subject as ours
from shardproof.reference.case import Case
from shardproof.suites.drawing.own_cases import cases_around
from shardproof.suites.session.prover import Prover
from shardproof.suites.test_engines import cases_to_compare
from shardproof.suites.test_training import OPTIMIZERS
from tests.harness.own_words import WORDS, Network, subject
from tests.suites.conftest import SMALL, Session

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.usefixtures("loaded")

OWN = "tests.harness.own_words:"


def test_every_suite_passes(outside: Session) -> None:
    tests = [
        f"shardproof.suites.test_{name}" for name in ("forward", "training", "races", "equivalence", "communication")
    ]
    result = outside(*tests, "--subject", f"{OWN}subject", "--modes", "dp+tp")
    result.assert_outcomes(passed=4, skipped=1)


def test_a_property_of_a_word_that_the_subject_lacks_is_skipped_and_a_refusal_that_raises_is_not() -> None:
    lacking = pytest.raises(pytest.skip.Exception, match="cases of .*:subject have no word optimizer")
    with Prover.on(f"{OWN}subject", "2,3,6") as prover, lacking:
        prover.draw_case(None, "dp+tp", optimizer="adamw")  # type: ignore[arg-type]
    with Prover.on(f"{ME}speechless", "2") as prover, pytest.raises(Unanswered, match="LookupError: no words"):
        prover.fit_case(Case.parse(SMALL))


class Split(Network):
    """The same subject, which refuses data ranks."""

    cases: Any = ("tp=2",)

    def refuses(self, case: Any) -> str:
        return "has no data ranks" if case.dp > 1 else ""


split = Split()


def test_a_subject_without_data_ranks_has_no_other_grouping(outside: Session) -> None:
    result = outside("shardproof.suites.test_regrouping", "--subject", "tests.suites.test_own_words:split", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*no case that *:split names has data ranks (dp > 1)"])


def test_a_wrong_one_fails_and_is_repeated_with_its_truth(outside: Session) -> None:
    words = ("--subject", f"{OWN}doubled", "--truth", f"{OWN}truth", "--case", "tp=2 dp=3 act=tanh")
    result = outside("shardproof.suites.test_forward", *words)
    result.assert_outcomes(failed=1)
    repeat = f'repeat: shardproof run "tp=2 dp=3 act=tanh" --subject {OWN}doubled --truth {OWN}truth'
    result.stdout.fnmatch_lines([f"*{repeat}"])


def _drawn(subject_: Any, mode: str, **fixed: Any) -> list[PlainCase]:
    found: list[PlainCase] = []

    @settings(max_examples=30, database=None, phases=(Phase.generate,), suppress_health_check=tuple(HealthCheck))
    @given(case=cases_around(resolve_subject(subject_), mode, fixed))
    def draw(case: PlainCase) -> None:
        found.append(case)

    draw()
    return found


def test_cases_are_drawn_around_those_that_the_subject_names() -> None:
    drawn = _drawn(subject, "tp", steps=2)
    assert {(case.tp, case.dp, case.act, case.dtype, case.steps) for case in drawn} == {(3, 1, "tanh", "float32", 2)}
    assert len({case.seed for case in drawn}) > 5 and {case.micro for case in drawn} == {1, 2, 3}
    assert {case.act for case in _drawn(subject, "dp+tp")} == {"relu", "tanh"}


class Few(Network):
    """Takes one number of micro-batches, one seed, two numbers of steps."""

    words: Any = {**WORDS, "micro": (1,), "seed": (7,), "steps": (2, 4), "tp": (2, 1)}
    cases: Any = ("tp=2 dp=2",)


few = Few()


def test_of_a_word_with_legal_values_these_alone_are_drawn_and_a_property_of_another_is_skipped() -> None:
    drawn = _drawn(few, "dp+tp")
    assert {(case.micro, case.seed, case.tp) for case in drawn} == {(1, 7, 2)}
    assert {case.steps for case in drawn} == {2, 4} and {case.act for case in drawn} == {"relu", "tanh"}
    foreign = pytest.raises(pytest.skip.Exception, match="cannot have steps=1: is none of its values; legal: 2.4")
    with Prover.on(f"{ME}few", "4") as prover, foreign:
        prover.draw_case(None, "dp+tp", steps=1)  # type: ignore[arg-type]


class Drawing(Network):
    """Has a strategy of its own: tp of any size."""

    @staticmethod
    def draws() -> st.SearchStrategy[PlainCase]:
        texts = [f"tp={tp} dp={dp}" for tp in (2, 3, 4) for dp in (1, 2)]
        return st.sampled_from(
            [case for case in cases_of(texts, resolve_subject(subject)) if isinstance(case, PlainCase)]
        )


def test_a_strategy_of_its_own_is_drawn_from_and_one_that_is_none_is_a_wrong_request() -> None:
    found = {(case.tp, case.dp, case.steps) for case in _drawn(Drawing(), "tp", steps=3)}
    assert found == {(tp, 1, 3) for tp in (2, 3, 4)}
    wrong = Network()
    vars(wrong)["draws"] = 3
    with pytest.raises(RequestError, match="draws=3 must be a hypothesis strategy"):
        cases_around(resolve_subject(wrong), "tp", {})


ME = "tests.suites.test_own_words:"
EVERY = ("forward", "backward", "training", "consistency", "communication", "races", "equivalence", "engines")
PROVED: list[str] = []
"""The cases that a subject of this module was given."""


class Narrow:
    """Our subject for one architecture: it refuses a case for which `reason` returns words."""

    modes = ("tp",)

    def __init__(self, reason: Callable[[Case], str]) -> None:
        self.refuses = reason

    def __call__(self, case: Case, device: torch.device) -> Mapping[str, Any]:
        PROVED.append(str(case))
        return ours(case, device)


def _no_words(case: Case) -> str:
    raise LookupError("no words")


one = Narrow(lambda case: "" if (case.heads, case.hidden, case.dp) == (8, 64, 1) else "built for 8 heads of 8")
none = Narrow(lambda case: "built for 405b")
speechless = Narrow(_no_words)
lenient = Narrow(lambda case: "")


def test_a_subject_of_one_architecture_is_proved_on_its_default_cases() -> None:
    drawn: list[Case] = []
    with Prover.on(f"{ME}one", "2,4") as prover:

        @settings(max_examples=12, database=None, phases=(Phase.generate,))
        @given(data=st.data())
        def draw(data: st.DataObject) -> None:
            drawn.append(prover.draw_case(data, "tp", where_known=data.draw(st.sampled_from(OPTIMIZERS))))

        draw()
    assert {(case.heads, case.hidden, case.dp) for case in drawn} == {(8, 64, 1)}
    fixed = {(words["optimizer"], words["lr"], words["clip"]) for words in OPTIMIZERS}
    found = {(case.optimizer, case.lr, case.clip) for case in drawn}
    assert found <= fixed and len(found) > 1, "the words that the property fixes"
    assert len({case.seed for case in drawn}) > 5, "other data in every example"


def test_a_subject_that_takes_nothing_is_skipped_with_its_reason(outside: Session) -> None:
    tests = [f"shardproof.suites.test_{name}" for name in ("communication", "races", "engines")]
    result = outside(*tests, "--subject", f"{ME}none", "-rs")
    result.assert_outcomes(skipped=3)
    reason = "takes none of * cases drawn and none of its default cases; the last: built for 405b; *"
    result.stdout.fnmatch_lines_random([f"SKIPPED*: *none {reason}"])
    assert result.stdout.str().count("built for 405b") >= 2


def test_every_suite_proves_the_one_case_or_says_why_not(outside: Session) -> None:
    PROVED.clear()
    tests = [f"shardproof.suites.test_{name}" for name in EVERY if name != "engines"]
    result = outside(*tests, "--subject", f"{ME}lenient", "--case", SMALL, "-rs")
    result.assert_outcomes(passed=6, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*claims tp alone, so there is no mode to compare it with"])
    assert set(PROVED) == {str(Case.parse(SMALL))}
    with Prover.on(f"{ME}lenient", "2", case=SMALL) as prover:
        assert cases_to_compare(prover) == [Case.parse(SMALL)], "the engines'"
    large = SMALL.replace("tp=2", "tp=2 dp=4")
    with Prover.on(f"{ME}lenient", "2", case=large) as prover, pytest.raises(pytest.skip.Exception, match="8 ranks"):
        cases_to_compare(prover)
    refused = outside(
        *(f"shardproof.suites.test_{name}" for name in EVERY), "--subject", f"{ME}one", "--case", SMALL, "-rs"
    )
    refused.assert_outcomes(skipped=8)


def test_a_stored_ledger_is_held_for_what_the_subject_takes(outside: Session) -> None:
    words = ("shardproof.suites.test_ledger", "--subject", f"{OWN}subject", "--ledger-baseline", "ledgers")
    cases = len(subject.cases)
    outside(*words, "--update-ledgers").assert_outcomes(passed=cases + 1)
    outside(*words).assert_outcomes(passed=cases + 1)
