"""Terms that hold at some places of the mesh alone: a subject whose ranks differ, and everybody who reads its terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.checking.evidence import FAIL, PASS, UNKNOWN
from harness.predicting.figures import traffic
from harness.running.proof import CaseResult
from harness.running.summary import summarize
from harness.terms import Term, closed_forms
from harness.witnesses.agreement import agreement, of_ledger
from harness.witnesses.chosen import terms_of
from reference.case import Case
from tests.harness.proofs import proved, verdict_of
from tests.harness.toy_subjects import right

CASE = Case.parse("mode=tp tp=2 dp=3 layers=1 hidden=16 heads=4 ffn=16 vocab=128 seq=8 batch=2 micro=1 steps=2")
BYTES = 24


def terms(at: Mapping[str, int], steps: int = 2) -> list[Term]:
    call = Term(phase="grad_sync", op="broadcast", axis="tp", payload_bytes=BYTES, group_size=2, calls=steps, at=at)
    return [call, Term(phase="grad_sync", op="all_reduce", axis="dp", payload_bytes=8, group_size=3, calls=steps)]


@dataclass(frozen=True)
class Uneven:
    """The dense model on every rank; once a step all ranks talk over dp, and the last data rank's over tp too."""

    at: Mapping[str, int] = field(default_factory=lambda: {"dp": 2})
    modes: tuple[str, ...] = ("tp",)

    def __call__(self, case: Case, device: torch.device) -> dict[str, Any]:
        groups = {axis: [dist.new_group(list(ranks)) for ranks in case.axes[axis]] for axis in ("tp", "dp")}
        mine = {
            axis: next(group for group, ranks in zip(made, case.axes[axis], strict=True) if dist.get_rank() in ranks)
            for axis, made in groups.items()
        }
        for _ in range(case.steps):
            dist.all_reduce(torch.ones(2), group=mine["dp"])
            if case.axis_rank("dp", dist.get_rank()) == 2:
                dist.broadcast(torch.ones(6), group=mine["tp"], group_src=0)
        outcome: dict[str, Any] = right(case, device)
        return outcome

    def expected(self, case: Case) -> list[Term]:
        return terms(self.at, case.steps)


def ledger(result: CaseResult) -> Any:
    return verdict_of(result, "ledger")


def test_a_rank_must_issue_what_its_coordinates_select() -> None:
    result = proved(Uneven(), CASE)
    assert (ledger(result).verdict, ledger(result).message) == (PASS, "4 events a rank, as the closed form states")
    assert {len([e for e in result.events if e.rank == rank]) for rank in (0, 1, 2, 3)} == {2}

    wrong = ledger(proved(Uneven(at={"dp": 0}), CASE))
    assert wrong.verdict == FAIL and "ranks 0, 1 of 6" in wrong.message
    everywhere = ledger(proved(Uneven(at={}), CASE))
    assert everywhere.verdict == FAIL and "ranks 0, 1, 2, 3 of 6" in everywhere.message
    both = ledger(proved(Uneven(at={"dp": 2, "tp": 1}), CASE))
    assert both.verdict == FAIL and "rank 4 of 6" in both.message


def test_an_axis_that_the_mesh_does_not_have_is_the_authors_mistake() -> None:
    result = proved(Uneven(at={"stage": 1}), CASE)
    (found,) = (verdict for verdict in result.verdicts if verdict.check == "expectation")
    assert found.verdict == UNKNOWN
    assert "stage is no axis of the case's mesh; legal: tp" in found.message
    with pytest.raises(ValueError, match=r"at=.*places on dp are whole numbers from 0"):
        Term(op="all_reduce", at={"dp": -1})
    assert repr(Term(op="all_reduce", at={"dp": 2})) == 'Term(op="all_reduce", at={"dp": 2})'


def test_everybody_reads_the_terms_of_a_rank() -> None:
    result = proved(Uneven(), CASE)
    forms = closed_forms(terms({"dp": 2}), range(6), CASE.axes)
    assert [len(forms[rank].partial) for rank in range(6)] == [1, 1, 1, 1, 2, 2]
    rows = summarize(result.text, "tp", 6, result.events, terms({"dp": 2}), (), CASE.axes)
    assert {row.axis: (row.expected_calls, row.calls, row.min_calls) for row in rows} == {
        "dp": (2, 2, None),
        "tp": (2, 2, 0),
    }
    assert agreement(of_ledger(result.events), {}, result.events, terms({"dp": 2}), CASE.axes).broken == ()
    assert agreement(of_ledger(result.events), {}, result.events, terms({"dp": 1}), CASE.axes).broken != ()
    chosen, why = terms_of(range(1, 2), CASE, terms({"dp": 2}), Uneven().expected)
    assert (why, chosen) == ("", tuple(terms({"dp": 2}, steps=1)))
    complete = Term(
        phase="grad_sync",
        region="",
        op="all_reduce",
        reduce_op="sum",
        axis="dp",
        group_size=3,
        dtype="float32",
        payload_bytes=8,
        calls=1,
        at={"dp": 0},
    )

    @dataclass(frozen=True)
    class First(Uneven):
        def expected(self, case: Case) -> list[Term]:
            return [complete]

    (told,) = traffic(CASE, First())
    assert told is not None and (told.calls, told.payload_bytes) == (1, 8), "of rank 0, which is at this place"
