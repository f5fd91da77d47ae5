"""The line `when:` of a failure names exactly the words of the case that it needs, for our subject and for others."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bugs.planting import planted
from harness.checking.evidence import FAIL, Verdict
from harness.diagnosing.six_lines import line_of
from harness.engines.threads.inproc import InprocEngine
from harness.plain_case import Vocabulary
from harness.protocols import Subject
from harness.running import experiments
from harness.running.experiments import Failed
from harness.running.proof import CaseResult, prove
from harness.running.request import Request
from harness.running.run import RunResult, run
from harness.subject import named
from parallel.subject import subject as ours
from reference.case import Case
from reports.stored.frames import load
from suites.mutants.catalogue import MUTANTS
from tests.harness import own_words

BUGS = {mutant.name: mutant for mutant in MUTANTS}


@pytest.fixture
def result_of(tmp_path: Path) -> Callable[..., RunResult]:
    def result_of(subject: Subject, *cases: Any, when_s: float = 10.0) -> RunResult:
        return run(Request(cases=cases, subject=named(subject), out=tmp_path / "runs", when_s=when_s))

    return result_of


def when(result: RunResult, case: Any) -> str:
    """The line of this case."""
    lines = [line_of(verdict.message, "when") for verdict in result.verdicts if verdict.case == str(case)]
    return next(filter(None, lines), "")


@pytest.mark.parametrize(
    ("bug", "text", "line"),
    [
        (
            "saved-input-not-gathered",
            "recompute=full distribute_saved=true family=llama kv_heads=4 vocab=510 dp=2",
            "only with tp=2 and distribute_saved=true; right with tp=1, with distribute_saved=false",
        ),
        (
            "divided-by-micro-batches-again",
            "mode=fsp layers=1 hidden=16 heads=2 ffn=6 seq=10 micro=3 overlap=false bias=false",
            "only with micro=2|3; right with micro=1",
        ),
        (
            "embedding-gradient-times-two",
            "layers=1 hidden=16 heads=2 ffn=6 seq=10",
            "other values of 37 words change nothing, with one rank too",
        ),
    ],
)
def test_exactly_the_words_that_a_planted_bug_needs(
    result_of: Callable[..., RunResult], bug: str, text: str, line: str
) -> None:
    case = Case.parse(text)
    result = result_of(planted(BUGS[bug].sources()), case)
    assert when(result, case) == line
    assert {verdict.message.count("\nwhen:   ") for verdict in result.verdicts if verdict.verdict == FAIL} == {1}
    stored = load(result.path).verdicts
    assert list(stored["message"]) == [verdict.message for verdict in result.verdicts]


class OnlyTanh(own_words.Network):
    """A subject in its own words, wrong with one value of one of them on several ranks of one axis."""

    def __call__(self, case: Any, device: Any) -> Any:
        wrong = case.act == "tanh" and case.dp > 1
        return own_words.Network(2.0 if wrong else 1.0)(case, device)


def test_a_subject_with_words_of_its_own_gets_its_own_words(result_of: Callable[..., RunResult]) -> None:
    case = Vocabulary.of(own_words.WORDS).parse("tp=3 dp=2 act=tanh dtype=float32 steps=3")
    assert when(result_of(OnlyTanh(), case), case) == ("only with dp=2 and act=tanh; right with dp=1, with act=relu")


def test_failures_from_one_place_share_the_line_of_the_simplest(result_of: Callable[..., RunResult]) -> None:
    words = "layers=1 hidden=16 heads=2 ffn=6 seq=10 micro=3"
    larger, simple = Case.parse(f"{words} dp=2 bias=false"), Case.parse(words)
    result = result_of(planted(BUGS["divided-by-micro-batches-again"].sources()), larger, simple)
    assert when(result, simple) == "only with micro=2|3; right with micro=1"
    assert when(result, larger) == f"{when(result, simple)} (tried on {str(simple)!r})"


def test_experiments_end_with_their_budget(result_of: Callable[..., RunResult]) -> None:
    """A failure may take `when_s` seconds, and words that were not tried are named."""
    case = Case.parse("layers=1 hidden=16 heads=2 ffn=6 seq=10 micro=3")
    start_s = time.monotonic()
    result = result_of(planted(BUGS["divided-by-micro-batches-again"].sources()), case, when_s=1e-6)
    assert time.monotonic() - start_s < 20
    assert "no time was left to try mode, tp, " in when(result, case)


def test_a_right_run_makes_no_experiment(result_of: Callable[..., RunResult], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "needed_words", None)
    assert result_of(own_words.subject, Vocabulary.of(own_words.WORDS).parse("tp=2 dp=3")).exit_status == 0


def test_an_experiment_saves_no_checkpoint_where_the_case_does(
    result_of: Callable[..., RunResult], tmp_path: Path
) -> None:
    case = Case.parse(f"layers=1 hidden=16 heads=2 ffn=6 seq=10 micro=3 save={tmp_path}/saved")
    result = result_of(planted(BUGS["divided-by-micro-batches-again"].sources()), case)
    assert when(result, case) == "only with micro=2|3; right with micro=1"
    assert [path.name for path in tmp_path.iterdir()] in (["saved", "runs"], ["runs", "saved"])


def test_an_experiment_makes_no_control_run_for_a_failure_beyond_doubt() -> None:
    """One tensor is wrong beyond doubt, another is within what rounding may do: nobody asks which of them are wrong."""
    case = Case.parse("layers=1 hidden=16 heads=2 ffn=6 seq=10")
    parts: dict[bool, list[str]] = {True: [], False: []}
    with InprocEngine() as engine:
        for explain, heard in parts.items():
            result = prove(case, _doubled, engine, explain=explain, heard=heard.append)
            assert result.verdict == FAIL
    assert "control" in parts[True] and "control" not in parts[False]


def _doubled(case: Any, device: Any) -> Any:
    outcome: dict[str, Any] = dict(ours(case, device))
    for name, factor in (("grad/final_norm.weight", 2.0), ("grad/final_norm.bias", 1 + 1e-6)):
        outcome[name] = outcome[name] * factor
    return outcome


def test_where_calls_alone_failed_no_number_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []

    def proves(case: Any, checks: Any, timeout_s: float) -> CaseResult:
        seen.append(set(checks))
        return CaseResult(case=case, text=str(case), verdicts=())

    case = Case.parse("layers=1 hidden=16 heads=2 ffn=6 seq=10")
    failed = Verdict(case=str(case), check="ledger", verdict=FAIL, worst=None, message="a call too many")
    end_s = time.monotonic() + 10
    experiments.words_needed(Failed(case=case, verdicts=(failed,)), named(_doubled), proves, end_s)
    assert seen and all(checks == {"ledger", "groups", "waits"} for checks in seen)
