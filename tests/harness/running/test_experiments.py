"""Experiments on a failing case: the words that its failure needs, and the sizes that its factor comes from."""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof.bugs.planting import plant_subject
from shardproof.harness.checking.checks import CHECKS
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running import experiments
from shardproof.harness.running.engines import engine_named
from shardproof.harness.running.experiments import Failed, words_needed
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.harness.running.run_result import RunResult
from shardproof.harness.subject import case_of, resolve_subject
from shardproof.harness.terms import Term
from shardproof.harness.verdicts.facts import When, WhenKind
from shardproof.harness.verdicts.verdict import FAIL
from shardproof.harness.verdicts.words import when_line
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reports.printing.text_tables import headline_table
from shardproof.reports.stored.frames import load
from shardproof.reports.stored.summary import headline
from shardproof.reports.stored.unchecked import unchecked_notes
from shardproof.suites.mutants.catalogue import MUTANTS
from tests.harness import own_words
from tests.harness.noted import when_of
from tests.harness.proofs import proved, ran
from tests.harness.toy_subjects import Changed

BUGS = {mutant.name: mutant for mutant in MUTANTS}


def when(result: RunResult, case: Any = None) -> str:
    lines = [when_of(one) for one in result.verdicts if case is None or one.case == str(case)]
    return next(filter(None, lines), "")


def test_exactly_the_words_that_a_planted_bug_needs(tmp_path: Path) -> None:
    sizes = "family=llama kv_heads=4 vocab=62 dp=2 layers=1 hidden=32 seq=16"
    bug = plant_subject(BUGS["saved-input-not-gathered"].sources())
    result = ran(tmp_path, bug, f"recompute=full distribute_saved=true {sizes}", when_s=60.0)
    right = "passes with tp=1, with distribute_saved=false"
    on = "hidden=32 kv_heads=8 ffn=88 vocab=512 seq=16 batch=1 micro=1 recompute=full distribute_saved=true steps=1"
    assert when(result) == f"fails with tp=2 and distribute_saved=true; {right} (tried on 'layers=1 {on}')"
    assert {verdict.message.count("\nwhen:   ") for verdict in result.verdicts if verdict.verdict == FAIL} == {1}
    stored = load(result.path).verdicts
    assert list(stored["message"]) == [verdict.message for verdict in result.verdicts]


only_tanh = own_words.Network(lambda case: 2.0 if case.act == "tanh" and case.dp > 1 else 1.0)
"""A subject in its own words, wrong with one value of one of them on several ranks of one axis."""


def test_a_subject_with_words_of_its_own_gets_its_own_words(tmp_path: Path) -> None:
    result = ran(tmp_path, only_tanh, "tp=3 dp=2 act=tanh dtype=float32 micro=1", when_s=60.0)
    on = "dp=2 steps=1 micro=1 act=tanh"
    assert when(result) == f"fails with dp=2 and act=tanh; passes with dp=1, with act=relu (tried on {on!r})"


def test_failures_from_one_place_share_the_line_of_the_simplest_and_nothing_is_saved(tmp_path: Path) -> None:
    """No experiment saves the checkpoint that the case does."""
    plain = "layers=1 hidden=16 heads=2 ffn=6 seq=10 steps=1 micro=3"
    larger, simple = Case.parse(f"{plain} dp=2 bias=false"), Case.parse(f"{plain} save={tmp_path}/ck")
    bug = plant_subject(BUGS["divided-by-micro-batches-again"].sources())
    result = ran(tmp_path / "runs", bug, larger, simple, when_s=60.0)
    on = "tp=1 layers=1 hidden=16 heads=2 ffn=6 vocab=512 seq=10 batch=1 steps=1"
    assert when(result, simple) == f"fails with micro=2|3; passes with micro=1 (tried on {on!r})"
    assert when(result, larger) == when(result, simple)
    assert {path.name for path in tmp_path.iterdir()} == {"ck", "runs"}


def test_a_case_that_the_line_of_another_one_would_contradict_gets_its_own(tmp_path: Path) -> None:
    """Both fail at one place, the second one with the value with which the first one is right."""
    both = own_words.Network(lambda case: 2.0 if case.dp > 1 and (case.act == "tanh" or case.tp == 3) else 1.0)
    first, second = "dp=2 act=tanh", "tp=3 dp=2"
    result = ran(tmp_path, both, first, second, when_s=60.0)
    lines = {one.case: when_of(one) for one in result.verdicts if one.verdict == FAIL}
    assert lines[first].startswith("fails with dp=2 and act=tanh; passes with dp=1, with act=relu (tried on")
    assert lines[second].startswith("fails with tp=3 and dp=2; passes with tp=1|2, with dp=1 (tried on")


def test_no_case_is_run_twice_by_the_same_checks_and_only_statements_are_run_by_laws(engine: InprocEngine) -> None:
    runs: list[tuple[str, bool]] = []

    def prove_counted(case: Any, *, checks: Mapping[str, Any], **how: Any) -> CaseResult:
        runs.append((str(case), checks is CHECKS))
        return prove(case, only_tanh, engine, checks=checks, explain=False, **how)

    subject = resolve_subject(only_tanh)
    case = case_of("tp=3 dp=2 act=tanh micro=1", subject)
    failed = Failed(case=case, verdicts=prove(case, only_tanh, engine, explain=False).verdicts)
    found = words_needed(failed, subject, prove_counted, 60.0)
    assert {one.word for one in found.needed} == {"dp", "act"}
    assert len({*runs}) == len(runs)
    by_laws = [text for text, laws in runs if laws]
    assert len(by_laws) == 3 < len(runs) / 2, "the case itself, and one for each word"


def test_experiments_end_with_their_budget(tmp_path: Path) -> None:
    """A failure may take `when_s` seconds; where that is no time, that is said."""
    start_s = time.monotonic()
    result = ran(tmp_path, only_tanh, "tp=2 dp=2 act=tanh", when_s=1e-6)
    assert time.monotonic() - start_s < 20
    assert when(result) == when_line(When(kind=WhenKind.NOT_SEARCHED))


def test_failures_to_which_a_slow_search_did_not_come_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "_prove_each", lambda *given, apart: iter(()))
    result = ran(tmp_path, only_tanh, "tp=2 dp=2 act=tanh", when_s=10.0)
    assert when(result) == when_line(When(kind=WhenKind.NOT_SEARCHED))
    assert not any(map(when_of, ran(tmp_path, only_tanh, "tp=2 dp=2 act=tanh").verdicts)), "--when 0"


class Chatting:
    """Sums over its ranks in every micro-batch what it states once a step, on one rank too, where it states nothing."""

    words, truth = {"micro": (1, 2, 3), "steps": 1}, staticmethod(lambda case, device: {"loss/0": torch.ones(())})
    expected = staticmethod(lambda case: [Term(op="all_reduce", calls=1)] if case.dp > 1 else [])

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, torch.Tensor]:
        for _ in range(case.micro):
            dist.all_reduce(torch.ones(1))
        return {"loss/0": torch.ones(())}


def test_one_rank_that_fails_for_another_reason_is_no_evidence(tmp_path: Path) -> None:
    result = ran(tmp_path, Chatting(), "dp=2 micro=3", when_s=10.0)
    beside = "perhaps dp=2"  # one rank fails otherwise, so nothing is known of it
    assert when(result) == f"fails with micro=2|3, {beside}; passes with micro=1 (tried on 'dp=2 micro=2')"
    stored = load(result.path)
    assert headline_table(headline(stored)).rows[0][2] == "? 3", "calls of which no phase is known"
    assert [note for note in unchecked_notes(stored) if "no module, backward or optimizer" in note and "phase(" in note]


FIVE = torch.tensor(5.0, dtype=torch.float64)


class Apart:
    """A loss of five times the truth with two micro-batches, and a metric that differs by rounding on other ranks."""

    words, truth = {"micro": (1, 2), "steps": 1}, staticmethod(lambda case, device: {"loss/0": FIVE, "metric/0": FIVE})

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, torch.Tensor]:
        dist.all_reduce(torch.ones(1))
        metric = FIVE if dist.get_rank() == 0 else torch.nextafter(FIVE, FIVE + 1)
        return {"loss/0": FIVE * (5 if case.micro == 2 and case.dp > 1 else 1), "metric/0": metric}


def test_another_fault_of_the_case_is_no_evidence_and_has_its_own_line(tmp_path: Path) -> None:
    result = ran(tmp_path, Apart(), "dp=2 micro=2", when_s=10.0)
    lines = {one.check: when_of(one) for one in result.verdicts if one.verdict == FAIL}
    right = "passes with dp=1 but for regrouping, with micro=1 but for replicas"
    assert lines["forward"] == f"fails with dp=2 and micro=2; {right} (tried on 'dp=2 micro=2')"
    assert lines["replicas"] == when_line(When(kind=WhenKind.OTHER_FAULT))


@pytest.mark.parametrize(("name", "passes"), [("mixing", True), ("wrong", False), ("undecided", False)])
def test_a_case_that_fails_in_threads_alone_gets_that_as_its_line(
    name: str, passes: bool, tmp_path: Path, pool: PoolEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules of the subject keep state of a process; the processes are those of the session."""
    engines = {"inproc": engine_named("inproc"), "pool": nullcontext(pool)}
    monkeypatch.setattr("shardproof.harness.running.run.engine_named", lambda name: engines[name])
    result = ran(tmp_path, f"tests.harness.running.subjects.sharing:{name}", "dp=2", when_s=60.0)
    assert result.exit_status == 1
    assert (when(result) == when_line(When(kind=WhenKind.ONLY_IN_THREADS))) is passes, when(result)


def test_a_right_run_makes_no_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "needed_words", None)
    assert ran(tmp_path, own_words.subject, "tp=2 dp=3", when_s=60.0).exit_status == 0


TEXT = "mode=tp tp=2 micro=2 layers=1 hidden=16 heads=4 kv_heads=4 ffn=16 vocab=128 seq=8 steps=1 lr=0.1"


def causes(factor: Callable[[Case], float], **stated: Any) -> list[tuple[str, str]]:
    """Ids and words for our subject with a factor on the norms' gradients, which all ranks hold whole."""

    def scaled(case: Case, outcome: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: outcome[name] * factor(case) for name in outcome if re.fullmatch(r"grad/.*norm\.weight", name)}

    result = proved(Changed(subject, scaled, **stated), TEXT)
    assert result.diagnosis is not None
    return [(cause.id, cause.words) for cause in result.diagnosis.causes]


def test_a_factor_that_follows_a_size_comes_from_it() -> None:
    ((known, words),) = causes(lambda case: 1 / case.tp)
    assert (known, "0.3333 where tp" in words or "0.25 where tp=4" in words) == ("size_factor", True)
    ((known, words),) = causes(lambda case: 1 / case.micro)
    assert (known, "1 / the number of micro-batches" in words) == ("size_factor", True)
    assert "0.3333 where micro=3" in words


def test_a_factor_that_stays_is_a_constant_and_one_that_changes_otherwise_is_not_told() -> None:
    ((known, words),) = causes(lambda case: 0.5)
    assert known == "constant_factor"
    assert words.startswith("all are 0.5 x the truth (0.5 where")
    assert causes(lambda case: 2.0**-case.tp * 2 if case.micro == 2 else 0.3) == []


def test_other_cases_that_the_subject_refuses_or_cannot_run_decide_nothing() -> None:
    ran: list[str] = []

    def refuses(case: Case) -> str:
        return "" if (case.tp, case.micro) == (2, 2) else "not this one"

    def once(case: Case) -> float:
        ran.append(str(case))
        if refuses(case):
            raise RuntimeError("no such case")
        return 0.5

    for found in (causes(lambda case: 0.5, refuses=refuses), causes(once)):
        assert [known for known, _ in found] == ["size_factor"]
    assert any("micro=3" in case for case in ran)  # they were tried
