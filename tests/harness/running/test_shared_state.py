"""State that ranks share because they are threads: found by a second opinion on processes, with the modules to name."""

from contextlib import nullcontext
from typing import Any

import pytest

from shardproof.harness.checking.evidence import FAIL, PASS
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.running import shared_state
from shardproof.harness.running.request import Request
from shardproof.harness.running.result import CaseResult
from shardproof.harness.running.run import proving
from shardproof.harness.running.shared_state import keepers
from shardproof.harness.subject import case_of, named

SUBJECTS = "tests.harness.running.subjects.sharing"
STATELESS = "tests.harness.running.subjects.stateless"
KEEPER = "tests.harness.running.subjects.shared_groups"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, pool: PoolEngine) -> list[str]:
    """How often processes were used; they are those of the session."""
    found: list[str] = []

    def opened() -> Any:
        found.append("asked")
        return nullcontext(pool)

    monkeypatch.setattr(shared_state, "PoolEngine", opened)
    return found


def results(address: str, count: int = 1, words: str = "dp=2") -> list[CaseResult]:
    """The case proved as a command does it, `count` times."""
    case = case_of(words, named(address))
    with proving(Request(cases=(case,) * max(2, count), subject=named(address))) as prove:
        return [prove(case) for _ in range(count)]


def causes(result: CaseResult) -> list[str]:
    """The lines of causes of all failed checks."""
    messages = [one.message for one in result.verdicts if one.verdict == FAIL]
    return [line for message in messages for line in message.splitlines() if line.startswith("causes:")]


@pytest.mark.slow
def test_a_case_that_passes_on_processes_names_the_modules_that_per_rank_needs(asked: list[str]) -> None:
    (result,) = results(f"{SUBJECTS}:mixing")
    assert result.verdict == FAIL and asked == ["asked"]
    told = "ranks share state here because they are threads: with --engine pool this case passes; legal: "
    assert causes(result)
    assert set(causes(result)) == {f"causes: {told}subject.per_rank = ({KEEPER!r},), with which it passes here too"}
    assert result.diagnosis is not None and result.diagnosis.causes[0].id == "shared_state"


@pytest.mark.slow
def test_a_context_that_changes_torch_for_the_process_belongs_in_the_session(asked: list[str]) -> None:
    """The search for modules ends without an answer."""
    (result,) = results("tests.harness.running.subjects.own_loss_parallel:subject", words="tp=2")
    assert result.verdict == FAIL and asked == ["asked"]
    (line,) = causes(result)
    assert "with --engine pool this case passes; legal: subject.session = torch.distributed.tensor.parallel" in line
    assert [one.check for one in result.verdicts] == ["run"], "it raises, without a number to compare"
    assert "if --engine pool passes" not in result.verdicts[0].message


def test_what_is_wrong_on_processes_too_keeps_its_own_cause_and_is_asked_once_a_run(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module is looked for: the other process need not be there."""
    monkeypatch.setattr(shared_state, "searching", lambda *_, **__: nullcontext())
    first, second = results(f"{SUBJECTS}:wrong", 2)
    assert asked == ["asked"] and first.verdict == second.verdict == FAIL
    assert causes(first) == causes(second)
    assert causes(first)[0].endswith("wrong: loss 1 of 1") and "share state" not in "".join(causes(first))


def test_right_runs_and_subjects_without_such_modules_are_never_asked(asked: list[str]) -> None:
    for name, verdict in (("right", PASS), ("wrong", FAIL)):
        (result,) = results(f"{STATELESS}:{name}")
        assert result.verdict == verdict
    assert asked == []


def test_modules_that_keep_state_are_found_by_what_they_do() -> None:
    for address, found in ((f"{SUBJECTS}:mixing", (KEEPER,)), (f"{STATELESS}:right", ())):
        assert keepers(named(address).address) == found  # once it is imported
