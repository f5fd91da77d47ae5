"""Statements of a subject: deviations, which cover no other failure; terms that hold at some places of the mesh."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof import run
from shardproof.harness.checking.checks import CHECKS, run_checks
from shardproof.harness.errors import RequestError
from shardproof.harness.predicting.figures import traffic_by_rank
from shardproof.harness.running.summary import summarize
from shardproof.harness.terms import Term, closed_forms
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN
from shardproof.harness.witnesses.agreement import agreement, of_ledger
from shardproof.harness.witnesses.chosen import terms_of
from shardproof.reference.case import Case
from shardproof.reports.stored.frames import load
from shardproof.reports.stored.unchecked import unchecked_notes
from tests.harness import own_words
from tests.harness.noted import names_of, reasons_of
from tests.harness.own_words import Network
from tests.harness.proofs import proved, told, verdict_of
from tests.harness.toy_subjects import Stating, right

DESIGN = "the balance loss is summed over all ranks"
CASE = "tp=2 dp=2 steps=1 micro=1"


Bug = Callable[[Any], object]


class Balanced(Network):
    """Its gradient of w2 deviates by design: the truth's times `factor`; a `bug` is planted beside it."""

    cases = (CASE, "tp=2", "dp=2")

    def __init__(self, factor: float = 1.5, bug: Bug = lambda outcome: None, **stated: Any) -> None:
        super().__init__(**stated)
        self.deviation, self.bug = factor, bug

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome = dict(super().__call__(case, device))
        outcome["grad/w2"].local.mul_(self.deviation)
        self.bug(outcome)
        return outcome


def too_large(outcome: Any) -> None:
    outcome["grad/w1"].local.mul_(1.01)


def another_call(outcome: Any) -> None:
    dist.all_reduce(torch.zeros(3), dist.ReduceOp.SUM if dist.get_rank() else dist.ReduceOp.MAX)


DEVIATES = {"grad/w2": DESIGN}
noted = Balanced(deviates={**DEVIATES, "grad/w1": "a second one"})


@pytest.mark.parametrize(
    ("stated", "dtype"), [(DEVIATES, "float64"), (lambda case: {"grad/w[2-9]": f" {DESIGN}\n"}, "float32")]
)
def test_a_stated_deviation_is_named_and_not_judged(stated: Any, dtype: str) -> None:
    assert proved(Balanced(), f"{CASE} dtype={dtype}", explain=False).verdict == "fail"
    result = proved(Balanced(deviates=stated), f"{CASE} dtype={dtype}")
    assert result.verdict == "pass", told(result)
    gradients = verdict_of(result, "parameter_gradients")
    assert gradients.message.startswith("1 tensors agree")
    assert (names_of(gradients, "stated deviation"), reasons_of(gradients)) == (["grad/w2"], [DESIGN])


@pytest.mark.parametrize(
    ("wrong", "check"),
    [
        ({"bug": too_large}, "parameter_gradients"),
        ({"bug": lambda outcome: outcome["grad/w2"].local[0].fill_(torch.nan)}, "parameter_gradients"),
        ({"bug": lambda outcome: outcome["grad/w2"].local.add_(dist.get_rank())}, "replicas"),
        ({"bug": another_call}, "run"),
        ({"expected": lambda case: []}, "ledger"),  # it makes calls
    ],
    ids=["another gradient", "not a number", "replicas differ", "ranks issue other calls", "an empty closed form"],
)
def test_it_hides_no_other_failure(wrong: dict[str, Any], check: str) -> None:
    result = proved(Balanced(deviates=DEVIATES, **wrong), CASE, explain=False)
    assert verdict_of(result, check).verdict == "fail"


def test_one_that_does_not_occur_is_said() -> None:
    result = proved(Balanced(factor=1.0, deviates=DEVIATES), CASE)
    assert result.verdict == "pass"
    gradients = verdict_of(result, "parameter_gradients")
    assert names_of(gradients, "stated deviation that does not occur") == names_of(gradients) == ["grad/w2"]
    assert reasons_of(gradients) == [DESIGN]


def test_what_states_everything_says_nothing() -> None:
    gradients = verdict_of(proved(Balanced(deviates={"grad/*": DESIGN}, bug=too_large), CASE), "parameter_gradients")
    assert gradients.verdict == "unknown" and "every one deviates as stated" in gradients.message
    coverage = verdict_of(proved(Balanced(deviates={"*": DESIGN}), CASE), "coverage")
    assert coverage.verdict == "unknown" and "states every name of the truth" in coverage.message
    idle = verdict_of(proved(Balanced(factor=1.0, deviates={"grad/w3": DESIGN}), CASE), "coverage")
    assert "deviates='grad/w3' matches no name of the truth (grad/w2?)" in idle.message


def _applied(factor: float) -> Any:
    def truth(case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome = own_words.truth(case, device)
        return {"grad/w2": outcome["grad/w2"] * factor, "loss/0": outcome["loss/0"] * 7}

    return truth


def test_a_truth_that_applies_it_judges_its_tensors() -> None:
    """The truth judges the stated tensors by the deviation, and no other tensors."""
    right = proved(Balanced(deviates={"grad/w2": (DESIGN, _applied(1.5))}), CASE)
    assert right.verdict == "pass"
    gradients = verdict_of(right, "parameter_gradients")
    assert gradients.message.startswith("2 tensors agree")
    assert names_of(gradients, "stated deviation that the truth applies") == names_of(gradients) == ["grad/w2"]
    wrong = proved(Balanced(deviates={"grad/w2": (DESIGN, _applied(1.6))}), CASE, explain=False)
    assert verdict_of(wrong, "parameter_gradients").verdict == "fail"


def test_one_that_follows_the_data_ranks_is_another_one_in_another_grouping() -> None:
    class Counted(Balanced):
        def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
            return Balanced(1 + case.dp / 4)(case, device)

    applied = {"grad/w2": (DESIGN, lambda case, device: _applied(1 + case.dp / 4)(case, device))}
    result = proved(Counted(deviates=applied), CASE)
    assert result.verdict == "pass", told(result)
    assert names_of(verdict_of(result, "regrouping"), "stated deviation that the truth applies") == ["grad/w2"]


def test_what_is_no_statement_is_refused_before_anything_is_run() -> None:
    """A truth that applies the deviation needs a dense model, or it is refused too."""
    for said in ("grad/w2", {"grad/w2": ""}, {"grad/w2": 3}, {3: DESIGN}, {"grad/w2": (DESIGN, 3)}):
        with pytest.raises(RequestError, match="deviates=.* must map patterns of names to a sentence each.*; legal: "):
            proved(Balanced(deviates=said), CASE)
    with pytest.raises(RequestError, match="there is no dense model of the subject's own; legal: subject.truth"):
        proved(Balanced(deviates={"grad/w2": (DESIGN, _applied(1.5))}, truth="alone"), CASE)


def test_the_notes_of_a_run_name_it(tmp_path: Path) -> None:
    result = run([CASE], f"{__name__}:noted", out=str(tmp_path))
    notes = unchecked_notes(load(str(result.path)))
    assert f"stated deviation, not checked: {DESIGN} (1 grad; 1 case)" in notes
    assert "stated deviation that does not occur: a second one (grad/w1) in 1 case" in notes


PLACED = Case.parse("mode=tp tp=2 dp=3 layers=1 hidden=16 heads=4 ffn=16 vocab=128 seq=8 batch=2 micro=1 steps=2")
BYTES, AXES = 24, ("tp", "dp")


def terms(at: Mapping[str, int], steps: int = 2) -> list[Term]:
    call = Term(phase="grad_sync", op="broadcast", axis="tp", payload_bytes=BYTES, group_size=2, calls=steps, at=at)
    return [call, Term(phase="grad_sync", op="all_reduce", axis="dp", payload_bytes=8, group_size=3, calls=steps)]


@dataclass(frozen=True)
class Uneven:
    """The dense model on every rank; once a step all ranks talk over dp, and the last data rank's over tp too."""

    at: Mapping[str, int] = field(default_factory=lambda: {"dp": 2})
    modes: tuple[str, ...] = ("tp",)

    def __call__(self, case: Case, device: torch.device) -> dict[str, Any]:
        mine = {axis: dist.new_subgroups_by_enumeration([[*ranks] for ranks in case.axes[axis]])[0] for axis in AXES}
        for _ in range(case.steps):
            dist.all_reduce(torch.ones(2), group=mine["dp"])
            if case.axis_rank("dp", dist.get_rank()) == 2:
                dist.broadcast(torch.ones(6), group=mine["tp"], group_src=0)
        outcome: dict[str, Any] = right(case, device)
        return outcome

    def expected(self, case: Case) -> list[Term]:
        return terms(self.at, case.steps)


OF_CALLS = {"ledger": CHECKS["ledger"]}


def test_a_rank_must_issue_what_its_coordinates_select() -> None:
    result = proved(Uneven(), PLACED, checks=OF_CALLS)
    (ledger,) = result.verdicts
    assert (ledger.verdict, ledger.message) == (PASS, "4 events a rank, as the closed form states")
    assert {len([e for e in result.events if e.rank == rank]) for rank in (0, 1, 2, 3)} == {2}
    assert result.evidence is not None
    for at, ranks in (({"dp": 0}, (0, 1)), ({}, (0, 1, 2, 3)), ({"dp": 2, "tp": 1}, (4,))):
        claims = replace(result.evidence.claims, expectation=tuple(terms(at)))
        found = run_checks(replace(result.evidence, claims=claims), OF_CALLS)["ledger"]
        assert (found.verdict, found.ranks) == (FAIL, ranks)


def test_an_axis_that_the_mesh_does_not_have_is_the_authors_mistake() -> None:
    found = verdict_of(proved(Uneven(at={"stage": 1}), PLACED), "expectation")
    assert found.verdict == UNKNOWN
    assert "stage is no axis of the case's mesh; legal: tp" in found.message
    with pytest.raises(ValueError, match=r"at=.*places on dp are whole numbers from 0"):
        Term(op="all_reduce", at={"dp": -1})
    assert repr(Term(op="all_reduce", at={"dp": 2})) == 'Term(op="all_reduce", at={"dp": 2})'


def test_everybody_reads_the_terms_of_a_rank() -> None:
    result = proved(Uneven(), PLACED, checks=OF_CALLS)
    forms = closed_forms(terms({"dp": 2}), range(6), PLACED.axes)
    assert [len(forms[rank].partial) for rank in range(6)] == [1, 1, 1, 1, 2, 2]
    rows = summarize(result.text, "tp", 6, result.events, terms({"dp": 2}), (), PLACED.axes)
    counts = {row.axis: (row.expected_calls, row.calls, row.min_calls) for row in rows}
    assert counts == {"dp": (2, 2, None), "tp": (2, 2, 0)}
    assert agreement(of_ledger(result.events), {}, result.events, terms({"dp": 2}), PLACED.axes).broken == ()
    assert agreement(of_ledger(result.events), {}, result.events, terms({"dp": 1}), PLACED.axes).broken != ()
    chosen, why = terms_of(range(1, 2), PLACED, terms({"dp": 2}), Uneven().expected)
    assert (why, chosen) == ("", tuple(terms({"dp": 2}, steps=1)))
    complete = replace(terms({})[1], region="", reduce_op="sum", dtype="float32", calls=1, at={"dp": 0})

    (told,) = traffic_by_rank(PLACED, Stating(expected=lambda case: [complete]))
    assert told is not None and (told.calls, told.payload_bytes) == (1, 8), "of rank 0, which is at this place"
