"""The first wrong module is named for subjects that declare no layout: some of the bugs of `bench.places`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardproof
from bench.places.by_hand import subject
from bench.places.dense import REFERENCE, truth
from bench.places.planting import bugs_of, diagnosed, found, is_right, place, wordless, wrong_subject
from bugs.record import Bug
from harness.diagnosing.placing.modules_by_name import located
from harness.engines.processes.forked.pool import PoolEngine
from harness.engines.threads.inproc import InprocEngine
from harness.running.locating import wrong_module
from harness.running.locating.wrong_module import modules_of
from harness.running.proof import prove
from harness.running.trials.runs import recorded
from harness.running.trials.trial import Trial
from harness.running.truth.reference import reference_of
from harness.subject import case_of, named
from parallel.subject import subject as ours
from reference.case import Case

BUGS = bugs_of("places")
TUTORIALS = bugs_of("held_back/places")
SOME = {
    "attention-without-its-mask": "",
    "one-column-linear-does-not-sum-its-input-s-gradient": "not_summed",
    "row-wise-plan-that-sums-nothing": "not_summed",
    "ours-input-gradient-of-one-linear-halved": "averaged",
    "reduce-scatter-hands-out-other-parts": "shifted_shard",
    "mlp-averaged": "averaged",
}
"""Bug -> the cause that its first module's numbers tell, "" for none."""


@pytest.mark.parametrize("name", SOME)
def test_a_bug_is_traced_to_its_module_without_a_declared_layout(name: str, engine: InprocEngine) -> None:
    bug = {**BUGS, **TUTORIALS}[name]
    result = diagnosed(bug, engine)
    assert result.diagnosis is not None
    first = result.diagnosis.first
    assert is_right(place(result.diagnosis), bug)
    assert SOME[name] in {"", *(cause.id for cause in result.diagnosis.causes)}
    told = next(verdict.message for verdict in result.verdicts if verdict.verdict == "fail")
    assert f"{first.phase} of {first.region} in step 0" in told
    assert "no layout was declared" in told


def test_ranks_in_other_processes_send_what_their_modules_returned(pool: PoolEngine) -> None:
    bug = BUGS["row-linear-averages"]
    result = prove(Case.parse(bug.case), "tests.bench.averaging_subject:subject", pool, reference=REFERENCE)
    assert result.diagnosis is not None
    assert (result.diagnosis.first.phase, result.diagnosis.first.region) == (bug.phase, bug.region)


class Own:
    """The decoder split by hand with words of its own, planted with a bug; compared with a truth of its own."""

    words = {"layers": 2, "hidden": 16, "ffn": 24, "head_dim": 4, "vocab": 40, "seq": 8, "batch": 2, "micro": 3}  # noqa: RUF012

    cases = ("tp=2",)

    def __init__(self, bug: Bug) -> None:
        self.wrong = wrong_subject(bug)

    def __call__(self, case: Any, device: torch.device) -> Any:
        return self.wrong(case, device)

    def truth(self, case: Any, device: torch.device) -> Any:
        """The dense decoder."""
        return truth(case, device)


@pytest.mark.parametrize("compared_with", ["", "alone"])
def test_an_own_truth_and_a_subject_on_one_rank_are_captured_too(compared_with: str, engine: InprocEngine) -> None:
    bug = BUGS["row-linear-without-its-all-reduce"]
    result = shardproof.prove("tp=2 dp=1", Own(bug), engine, truth=compared_with)
    assert result.diagnosis is not None
    assert (result.diagnosis.first.phase, result.diagnosis.first.region) == (bug.phase, bug.region)


def test_nothing_is_looked_for_where_nothing_failed(engine: InprocEngine) -> None:
    result = prove(Case.parse(BUGS["row-linear-averages"].case), subject, engine, reference=REFERENCE)
    assert result.verdict == "pass"
    assert "located" not in result.seconds


def test_a_run_that_memory_may_not_hold_is_not_made(engine: InprocEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrong_module, "memory_bytes", lambda: 1000)
    result = diagnosed(BUGS["row-linear-averages"], engine)
    assert (result.verdict, "located" in result.seconds) == ("fail", False)
    (note,) = [verdict for verdict in result.verdicts if verdict.check == "explanation"]
    assert "the first wrong module was not looked for" in note.message


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ours", "mode=isp family=internlm2 vocab=264 tp=2 wp=2 dp=2 packed=true positions=rope delivery=local"),
        ("ours", "mode=tp-sp family=llama vocab=264 tp=2 dp=3 micro=3 recompute=full dtype=bfloat16"),
        ("suites.subjects.two_d:subject", "tp=2 dp=2 sp=true dtype=float32"),
    ],
)
def test_modules_of_right_subjects_agree(name: str, text: str, engine: InprocEngine) -> None:
    subject = named(wordless(ours) if name == "ours" else name)
    trial = Trial(case=case_of(text, subject), subject=subject, engine=engine, reference=reference_of(subject, engine))
    modules = modules_of(trial, recorded(trial))
    assert modules is not None
    assert located(modules, forward=True, backward=False) is None
    assert located(modules, forward=False, backward=True) is None


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["megatron-no-sum-leaves-a-region", "megatron-no-column-sums-its-gradient"])
def test_bugs_of_megatron_are_traced_too(name: str) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    assert is_right(found(BUGS[name]), BUGS[name])
