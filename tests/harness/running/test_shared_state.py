"""State that ranks share because they are threads: found by a second opinion on processes, with the modules to name."""

from contextlib import nullcontext
from typing import Any

import pytest

from harness.checking.evidence import FAIL, PASS
from harness.engines.processes.forked.pool import PoolEngine
from harness.plain_case import Vocabulary
from harness.running import shared_state
from harness.running.request import Request
from harness.running.result import CaseResult
from harness.running.run import proving
from harness.running.shared_state import keepers, searching
from harness.subject import named

SUBJECTS = "tests.harness.running.subjects.sharing"
STATELESS = "tests.harness.running.subjects.stateless"
KEEPER = "tests.harness.running.subjects.shared_groups"
CASE = Vocabulary.of({"micro": 1}).parse("dp=2")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, pool: PoolEngine) -> list[str]:
    """How often processes were used; they are those of the session."""
    found: list[str] = []

    def opened() -> Any:
        found.append("asked")
        return nullcontext(pool)

    monkeypatch.setattr(shared_state, "PoolEngine", opened)
    return found


def results(name: str, count: int = 1) -> list[CaseResult]:
    """The case proved as a command does it, `count` times."""
    subject = named(f"{SUBJECTS}:{name}")
    with proving(Request(cases=(CASE,) * max(2, count), subject=subject)) as prove:
        return [prove(CASE) for _ in range(count)]


def causes(result: CaseResult) -> list[str]:
    """The lines of causes of all failed checks."""
    messages = [one.message for one in result.verdicts if one.verdict == FAIL]
    return [line for message in messages for line in message.splitlines() if line.startswith("causes:")]


@pytest.mark.slow
def test_a_case_that_passes_on_processes_names_the_modules_that_per_rank_needs(asked: list[str]) -> None:
    (result,) = results("mixing")
    assert result.verdict == FAIL and asked == ["asked"]
    told = "ranks share state here because they are threads: with --engine pool this case passes; legal: "
    assert causes(result)
    assert set(causes(result)) == {f"causes: {told}subject.per_rank = ({KEEPER!r},), with which it passes here too"}
    assert result.diagnosis is not None and result.diagnosis.causes[0].id == "shared_state"


@pytest.mark.slow
def test_a_context_that_changes_torch_for_the_process_belongs_in_the_session(asked: list[str]) -> None:
    subject = named("tests.harness.running.subjects.own_loss_parallel:subject")
    case = Vocabulary.of({"micro": 1}).parse("tp=2")
    with proving(Request(cases=(case,), subject=subject)) as prove:
        result = prove(case)
    assert result.verdict == FAIL and asked == ["asked"]
    (line,) = causes(result)
    assert "with --engine pool this case passes; legal: subject.session = torch.distributed.tensor.parallel" in line
    assert [one.check for one in result.verdicts] == ["run"], "it raises, without a number to compare"
    assert "if --engine pool passes" not in result.verdicts[0].message


@pytest.mark.slow
def test_what_is_wrong_on_processes_too_keeps_its_own_cause_and_is_asked_once_a_run(asked: list[str]) -> None:
    first, second = results("wrong", 2)
    assert asked == ["asked"] and first.verdict == second.verdict == FAIL
    assert causes(first) == causes(second)
    assert "2 x the truth" in causes(first)[0] and "share state" not in "".join(causes(first))


def test_right_runs_and_subjects_without_such_modules_are_never_asked(asked: list[str]) -> None:
    for name, verdict in (("right", PASS), ("wrong", FAIL)):
        with proving(Request(cases=(CASE,), subject=named(f"{STATELESS}:{name}"))) as prove:
            assert prove(CASE).verdict == verdict
    assert asked == []


def test_modules_that_keep_state_are_found_by_what_they_do() -> None:
    assert keepers(f"{SUBJECTS}:mixing") == (KEEPER,)
    assert keepers(f"{STATELESS}:right") == ()


@pytest.mark.slow
def test_a_search_without_an_answer_ends_in_time() -> None:
    with searching(CASE, named(f"{SUBJECTS}:wrong"), limit_s=20.0) as needed:
        assert needed() == ()
