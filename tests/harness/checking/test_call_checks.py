"""Checks of calls: a group has ranks of the axis that names it; what a closed form says is hidden must be hidden."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from shardproof.harness.checking.call_checks import check_groups, check_overlap
from shardproof.harness.checking.checks import CHECKS, run_checks
from shardproof.harness.checking.finding import Finding
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.engines.threads.matcher import CollectiveMatcher
from shardproof.harness.recording.measures import Overlap
from shardproof.harness.running.engines import engine_named
from shardproof.harness.running.proof import prove
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.running.result import CaseResult
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reference.training import truth as dense
from tests.harness.noted import reasons_of
from tests.harness.proofs import verdict_of
from tests.harness.toy_evidence import TERMS, answer_of, events, evidence
from tests.harness.toy_subjects import Changed

STRIDED = {"tp": ((0, 2), (1, 3)), "dp": ((0, 1), (2, 3))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """Sums over the dim of a DeviceMesh that it calls `dim`; `order` is what it says of its axes, None for nothing."""

    dim: str = "tp"
    order: Any = None

    def axes(self, case: Case) -> Any:
        return self.order

    def __call__(self, case: Case, device: torch.device) -> dict[str, Tensor]:
        """The dense model after one call; nothing on meta tensors."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(self.dim, "dp"))
        dist.all_reduce(torch.ones(3, device=device), group=mesh[self.dim].get_group())
        return {} if device.type == "meta" else dense.subject(case, device)


unstated, stated, own_name = Strided(), Strided(order=STRIDED), Strided(dim="ring")


CASE = Case.parse("mode=tp tp=2 dp=2 layers=1 hidden=16 heads=2 seq=4 micro=1 steps=1")
TOY = "tests.harness.checking.test_call_checks:"
ASKED = {"groups": CHECKS["groups"]}


@pytest.fixture(scope="module", params=["inproc", "pool", "dry"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "pool":
        yield request.getfixturevalue("pool")
        return
    with engine_named(request.param) as made:
        yield made


def asked(subject: Any, engine: Engine) -> CaseResult:
    return prove(CASE, subject, engine, checks=ASKED)


def test_a_mesh_of_another_rank_order_is_named_with_the_ranks_seen_and_the_legal_ones(engine: Engine) -> None:
    result = asked(f"{TOY}unstated", engine)
    found = verdict_of(result, "groups")
    assert found.verdict == FAIL
    seen = "[0, 2]" if engine.name == "dry" and len(result.events) < 4 else "[0, 2] [1, 3]"
    assert f"run over the ranks {seen}, which are no rank lists of axis tp: [0, 1] [2, 3]" in found.message
    assert result.diagnosis is not None
    assert [cause.id for cause in result.diagnosis.causes] == ["wrong_group"]
    assert f"run over the ranks {seen}; the rank lists of axis tp are [0, 1] [2, 3]" in found.message
    assert "subject.axes(case)" in found.message
    assert verdict_of(asked(f"{TOY}stated", engine), "groups").verdict == PASS, "it states its rank order"


def test_a_name_that_no_axis_has_is_a_note() -> None:
    with engine_named("inproc") as engine:
        verdict = asked(f"{TOY}own_name", engine).verdicts[0]
    # the ranks are those of the case's dp, which is then the name in the ledger
    assert (verdict.verdict, verdict.notes) == (PASS, ())
    found = _judged(tuple(replace(event, axis="0,3", group=(0, 3)) for event in events()))
    assert found.verdict == PASS
    assert reasons_of(found) == ["group 0,3: no axis of the case or of subject.axes(case) has this name"]


def _judged(ledger: Any, **changes: Any) -> Finding:
    return run_checks(evidence(events=ledger, **changes), {"groups": check_groups})["groups"]


def test_an_axis_that_joins_two_has_the_ranks_of_both() -> None:
    for ranks, verdict in (((0, 1, 2, 3), PASS), ((0, 1), FAIL)):
        found = _judged(tuple(replace(event, axis="tp_dp", group=ranks) for event in events()), case=CASE)
        assert (found.verdict, found.notes) == (verdict, ())
    found = _judged(tuple(replace(event, group=(event.rank,), group_size=1) for event in events()))
    place = "forward", "embedding"  # a group of one that is named after a split axis
    assert (found.verdict, (found.phase, found.region)) == (FAIL, place)


@pytest.mark.parametrize(
    ("order", "rule"),
    [
        ({"tp": ((0, 2), (1, 2))}, "axis tp=((0, 2), (1, 2)): every rank of 4 must be in one rank list"),
        ({"tp": ((0, 1, 2, 3),)}, "axis tp=((0, 1, 2, 3),): the case has groups of 2 ranks"),
        ({"tp": 2}, "axis tp=2: every rank of 4 must be in one rank list"),
        (7, "axes=7 must map axes to rank lists; legal: {'tp': ((0, 1), (2, 3))}"),
    ],
)
def test_rank_lists_that_are_none_make_the_check_unknown_in_one_sentence(order: Any, rule: str) -> None:
    with engine_named("inproc") as engine:
        found = verdict_of(asked(Strided(order=order), engine), "groups")
    assert found.verdict == UNKNOWN
    assert found.message.startswith("subject.axes failed: ") and rule in found.message
    assert "legal: " in found.message and "\n" not in found.message


OVERLAPPED = Case.parse("mode=tp-sp tp=2 layers=1 hidden=16 heads=2 seq=4 micro=1 steps=1")
OF_CALLS = {name: CHECKS[name] for name in ("ledger", "waits", "overlap")}


exposed = Changed(
    lambda case, device: subject(case.but(overlap=False), device),
    modes=subject.modes,
    refuses=subject.refuses,
    expected=subject.expected,
)
"""Ours without overlap, which promises the overlap of the case; the ledger is the same."""


def test_calls_that_no_longer_overlap_fail_this_check_alone(engine: Engine) -> None:
    right = prove(OVERLAPPED, "shardproof.parallel.subject:subject", engine, checks=OF_CALLS)
    wrong = prove(OVERLAPPED, f"{TOY}exposed", engine, checks=OF_CALLS)
    assert right.verdict == PASS and "overlap" in {verdict.check for verdict in right.verdicts}
    (failed,) = [verdict for verdict in wrong.verdicts if verdict.verdict == FAIL]
    assert failed.check == "overlap" and wrong.diagnosis is not None
    assert re.search(r"in backward of head at \S*parallel/", failed.message)  # shortened where that line was first seen
    assert [cause.id for cause in wrong.diagnosis.causes] == ["stated"]


def test_as_many_calls_as_promised_must_be_hidden_on_every_rank() -> None:
    promised = (replace(TERMS[0], hidden=True), *TERMS[1:])
    mine = [event for event in events() if event.region == "embedding"]
    hidden = {(event.rank, event.call_index) for event in mine}

    def verdict(hidden: set[tuple[int, int]], **changes: Any) -> str:
        seen = evidence(expectation=promised, hidden=frozenset(hidden), **changes)
        return run_checks(seen, {"overlap": check_overlap})["overlap"].verdict

    assert verdict(hidden) == PASS
    assert verdict(hidden - {(1, mine[-1].call_index)}) == FAIL
    left_out = tuple(event for event in events() if event.region != "embedding")
    assert verdict(set(), events=left_out) == PASS  # a missing call is the ledger's
    # Nothing is asked without a promise or a measurement.
    assert answer_of(check_overlap, evidence(hidden=frozenset())) is None
    assert answer_of(check_overlap, evidence(expectation=tuple(replace(term, hidden=True) for term in TERMS))) is None


def test_products_are_counted_on_the_ranks_thread_and_nothing_stays() -> None:
    call: Any = type("Call", (), {"is_async": True, "device": "cpu"})()
    a = torch.ones(3, 3, requires_grad=True)

    def hidden(compute: Any) -> bool:
        with Overlap() as watching, watching.on_rank(0):
            ticket = watching.on_issue(0, call)
            compute()
            watching.on_completion(0, ticket)
            a @ a
        return (0, ticket) in watching.hidden

    assert hidden(lambda: a @ a)
    assert hidden(lambda: torch.nn.functional.scaled_dot_product_attention(a[None], a[None], a[None]))
    assert not hidden(lambda: (a + a).relu().clone())
    total = (a @ a).sum()
    assert hidden(total.backward)  # the products of backward run in C++
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm", "BackendSelect")


def test_on_a_device_a_call_is_hidden_until_it_is_waited_for_in_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are of the device "cuda", as on a GPU, where a completed call is not one that was waited for."""
    on_cpu, case = CollectiveMatcher._ledger_call, Case.parse("mode=tp-sp layers=1 micro=1 steps=1")

    def promised(engine: InprocEngine, record: bool = False) -> frozenset[tuple[int, int]] | None:
        run = execute(case, subject, engine, record=record, watch=True, overlap=True)
        calls = {(event.rank, event.call_index) for event in run.events}
        assert run.hidden is not None and (run.hidden <= calls or not record)
        return run.hidden

    with InprocEngine() as engine:
        right = promised(engine)
        assert right and right == promised(engine, record=True)
        monkeypatch.setattr(CollectiveMatcher, "_ledger_call", lambda *args: replace(on_cpu(*args), device="cuda"))
        assert promised(engine) == right
