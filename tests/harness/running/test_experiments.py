"""Experiments on a failing case: the words that its failure needs, and the sizes that its factor comes from."""

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bugs.planting import planted
from harness.checking.evidence import FAIL
from harness.diagnosing.failure_lines import line_of
from harness.engines.threads.inproc import InprocEngine
from harness.plain_case import Vocabulary
from harness.protocols import Subject
from harness.running import experiments
from harness.running.proof import prove
from harness.running.request import Request
from harness.running.result import CaseResult
from harness.running.run import run
from harness.running.run_result import RunResult
from harness.subject import named
from parallel.subject import subject
from reference.case import Case
from reports.stored.frames import load
from suites.mutants.catalogue import MUTANTS
from tests.harness import own_words

BUGS = {mutant.name: mutant for mutant in MUTANTS}
PLAIN, DIVIDED = "layers=1 hidden=16 heads=2 ffn=6 seq=10 steps=1", "divided-by-micro-batches-again"


@pytest.fixture
def result_of(tmp_path: Path) -> Callable[..., RunResult]:
    def result_of(subject: Subject, *cases: Any, when_s: float = 10.0) -> RunResult:
        return run(Request(cases=cases, subject=named(subject), out=tmp_path / "runs", when_s=when_s))

    return result_of


def when(result: RunResult, case: Any) -> str:
    lines = [line_of(verdict.message, "when") for verdict in result.verdicts if verdict.case == str(case)]
    return next(filter(None, lines), "")


@pytest.mark.parametrize(
    ("bug", "text", "line"),
    [
        (
            "saved-input-not-gathered",
            "recompute=full distribute_saved=true family=llama kv_heads=4 vocab=62 dp=2 layers=1 hidden=32 seq=16",
            "only with tp=2 and distribute_saved=true; right with tp=1, with distribute_saved=false",
        ),
        ("embedding-gradient-times-two", PLAIN, "other values of N words change nothing, with one rank too"),
    ],
)
def test_exactly_the_words_that_a_planted_bug_needs(
    result_of: Callable[..., RunResult], bug: str, text: str, line: str
) -> None:
    case = Case.parse(text)
    result = result_of(planted(BUGS[bug].sources()), case)
    assert re.sub(r"\d+ words", "N words", when(result, case)) == line  # N: as many as the language has
    assert {verdict.message.count("\nwhen:   ") for verdict in result.verdicts if verdict.verdict == FAIL} == {1}
    stored = load(result.path).verdicts
    assert list(stored["message"]) == [verdict.message for verdict in result.verdicts]


class OnlyTanh(own_words.Network):
    """A subject in its own words, wrong with one value of one of them on several ranks of one axis."""

    def __call__(self, case: Any, device: Any) -> Any:
        wrong = case.act == "tanh" and case.dp > 1
        return own_words.Network(2.0 if wrong else 1.0)(case, device)


def test_a_subject_with_words_of_its_own_gets_its_own_words(result_of: Callable[..., RunResult]) -> None:
    case = Vocabulary.of(own_words.WORDS).parse("tp=3 dp=2 act=tanh dtype=float32 micro=1")
    assert when(result_of(OnlyTanh(), case), case) == ("only with dp=2 and act=tanh; right with dp=1, with act=relu")


def test_failures_from_one_place_share_the_line_of_the_simplest_and_nothing_is_saved(
    result_of: Callable[..., RunResult], tmp_path: Path
) -> None:
    """No experiment saves the checkpoint that the case does."""
    larger, simple = Case.parse(f"{PLAIN} micro=3 dp=2 bias=false"), Case.parse(f"{PLAIN} micro=3 save={tmp_path}/ck")
    result = result_of(planted(BUGS[DIVIDED].sources()), larger, simple)
    assert when(result, simple) == "only with micro=2|3; right with micro=1"
    assert when(result, larger) == f"{when(result, simple)} (tried on {str(simple)!r})"
    assert {path.name for path in tmp_path.iterdir()} == {"ck", "runs"}


def test_experiments_end_with_their_budget(result_of: Callable[..., RunResult]) -> None:
    """A failure may take `when_s` seconds, and words that were not tried are named."""
    case, start_s = Vocabulary.of(own_words.WORDS).parse("tp=2 dp=2 act=tanh"), time.monotonic()
    result = result_of(OnlyTanh(), case, when_s=1e-6)
    assert time.monotonic() - start_s < 20
    assert "no time was left to try " in when(result, case)


def test_a_right_run_makes_no_experiment(result_of: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "needed_words", None)
    assert result_of(own_words.subject, Vocabulary.of(own_words.WORDS).parse("tp=2 dp=3")).exit_status == 0


SMALL = "layers=1 hidden=16 heads=4 kv_heads=4 ffn=16 vocab=128 seq=8 steps=1 lr=0.1"
TEXT = f"mode=tp tp=2 micro=2 {SMALL}"


def proved(engine: InprocEngine, text: str, factor: Callable[[Case], float], **attributes: Any) -> CaseResult:
    """The case on our subject with a factor on the norms' gradients, which all ranks hold whole."""

    def scaled(case: Case, device: torch.device) -> Mapping[str, Any]:
        outcome: dict[str, Any] = dict(subject(case, device))
        for name in [name for name in outcome if name.startswith("grad/") and name.endswith("norm.weight")]:
            outcome[name] = outcome[name] * factor(case)
        return outcome

    for name in ("expected", "activations", "axes"):
        setattr(scaled, name, getattr(subject, name, None))
    for name, value in attributes.items():
        setattr(scaled, name, value)
    return prove(Case.parse(text), scaled, engine)


def causes(result: CaseResult) -> list[tuple[str, str]]:
    assert result.diagnosis is not None
    return [(cause.id, cause.words) for cause in result.diagnosis.causes]


def test_a_factor_that_follows_a_size_comes_from_it(engine: InprocEngine) -> None:
    ((known, words),) = causes(proved(engine, TEXT, lambda case: 1 / case.tp))
    assert (known, "0.3333 where tp" in words or "0.25 where tp=4" in words) == ("averaged", True)
    ((known, words),) = causes(proved(engine, TEXT, lambda case: 1 / case.micro))
    assert (known, "micro=2: divided by it once more" in words) == ("constant_factor", True)
    assert "0.3333 where micro=3" in words


def test_a_factor_that_stays_is_a_constant_and_one_that_changes_otherwise_is_not_told(engine: InprocEngine) -> None:
    ((known, words),) = causes(proved(engine, TEXT, lambda case: 0.5))
    assert known == "constant_factor"
    assert words.startswith("all are 0.5 x the truth: a constant factor is wrong (0.5 where")
    assert causes(proved(engine, TEXT, lambda case: 2.0**-case.tp * 2 if case.micro == 2 else 0.3)) == []


def test_other_cases_that_the_subject_refuses_or_cannot_run_decide_nothing(engine: InprocEngine) -> None:
    both = ["averaged", "constant_factor"]
    ran: list[str] = []

    def refuses(case: Case) -> str:
        return "" if (case.tp, case.micro) == (2, 2) else "not this one"

    def once(case: Case) -> float:
        ran.append(str(case))
        if refuses(case):
            raise RuntimeError("no such case")
        return 0.5

    for result in (proved(engine, TEXT, lambda case: 0.5, refuses=refuses), proved(engine, TEXT, once)):
        assert [known for known, _ in causes(result)] == both
    assert any("micro=3" in case for case in ran)  # they were tried
