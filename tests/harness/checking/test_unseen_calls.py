"""Calls that no recorder sees: expected, counted as unseen, never missing; and a replayed step in a proof."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.checking.checks import examine
from harness.checking.evidence import FAIL, PASS, Finding
from harness.engines.threads.inproc import InprocEngine
from harness.ledger import Event
from harness.running.proof import prove
from harness.running.summary import summarize
from harness.subject import NamedSubject, case_of
from harness.terms import Term
from tests.harness.proofs import contradicted, told
from tests.harness.recording.simulated_graph import SimulatedGraph, graphs_simulated
from tests.harness.toy_evidence import TERMS, events, evidence

RING = Term(phase="forward", op="all_gather", axis="tp", calls=8, payload_bytes=64, carrier="user_buffer")


def judged(*terms: Term, ledger: tuple[Event, ...] | None = None) -> Finding:
    return examine(evidence(events=ledger or events(), expectation=(*TERMS, *terms)))["ledger"]


def test_an_expected_call_that_no_recorder_sees_is_unseen_and_never_missing() -> None:
    finding = judged(RING)
    assert finding.verdict == PASS
    assert "8 all_gather over tp, expected and carried by user_buffer, which no recorder sees" in finding.unchecked
    (row,) = [row for row in summarize("", "tp", 2, events(), (*TERMS, RING)) if row.phase == "forward"][:1]
    assert row.op == "all_reduce"

    finding = judged(replace(RING, carrier="c10d"))  # carried by torch
    assert finding.verdict == FAIL and "all_gather" in finding.message
    (call,) = events(world_size=1)[:1]
    more = tuple(replace(call, rank=rank, op="all_gather", reduce_op="", payload_bytes=64) for rank in range(2))
    assert judged(RING, ledger=(*events(), *more)).verdict == FAIL, "seen although it should not be"


def test_an_unknown_carrier_is_refused_with_legal_ones() -> None:
    with pytest.raises(ValueError, match=r"carrier='nvshmem'.*'user_buffer', 'deep_ep', 'replay'"):
        Term(op="all_gather", carrier="nvshmem")
    assert repr(RING).endswith('carrier="user_buffer")')


def stepped(case: Any, ranks: range, *, captured: bool) -> Mapping[str, Tensor]:
    """Steps on the samples of these data ranks, one by one or as replays of one; `captured` runs on a rank of many."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer, x = torch.optim.SGD([weight], lr=0.1), torch.zeros(len(ranks), 3, dtype=torch.float64)

    def step() -> None:
        optimizer.zero_grad()
        (x * weight).square().sum().div(case.dp).backward()
        if captured and case.calls != "none":
            dist.all_reduce(weight.grad)
        optimizer.step()

    graph = SimulatedGraph(step)
    if captured:
        graph.capture()
        with torch.no_grad():
            weight.fill_(1)  # a capture on a GPU computes nothing
    for number in range(case.steps):
        x.copy_(torch.stack([torch.arange(3.0).double() + case.samples(number, 0, rank, 1).start for rank in ranks]))
        graph.replay() if captured else step()
    if case.calls == "more":
        dist.all_reduce(x.clone())
    return {"param/weight": weight.detach(), "param_after/0/unused": torch.ones(())}


class Replaying:
    """A subject whose steps are replays of a CUDA graph, simulated."""

    words = {"calls": ("right", "more", "none"), "steps": 3, "micro": 1}  # noqa: RUF012

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        return stepped(case, range(dist.get_rank(), dist.get_rank() + 1), captured=True)

    @staticmethod
    def refuses(case: Any) -> str:
        return "captures one micro-batch" if case.micro > 1 else ""

    @staticmethod
    def truth(case: Any, device: torch.device) -> Mapping[str, Tensor]:
        return stepped(case.but(calls="right"), range(case.dp), captured=False)

    @staticmethod
    def expected(case: Any) -> Iterator[Term]:
        yield Term(op="all_reduce", axis="dp", dtype="float64", payload_bytes=24, calls=case.steps)


@pytest.mark.parametrize(("calls", "wrong"), [("right", set()), ("more", {"ledger"}), ("none", {"ledger", "replicas"})])
def test_a_step_that_is_replayed_is_proved_by_numbers_and_ledger(calls: str, wrong: set[str]) -> None:
    subject = NamedSubject(name="replaying", call=Replaying())
    with graphs_simulated(), InprocEngine() as engine:
        result = prove(case_of(f"dp=2 calls={calls}", subject), subject, engine)
    failed = contradicted(result)
    assert wrong <= failed if wrong else not failed, told(result)
    replayed = [event for event in result.events if event.graph]
    assert len(replayed) == (0 if calls == "none" else 2 * 3)
    assert sorted({event.step for event in replayed}) == ([] if calls == "none" else [0, 1, 2])
