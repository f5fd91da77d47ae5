"""Our stages in the hands of Megatron-Core's and torch's own schedules: the same numbers, and the same messages."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.checking.evidence import PASS
from parallel.communication.mesh import axis_rank
from parallel.subject import subject as ours
from reference.case import Case
from suites.session.prover import Prover
from tests.deep import deep
from tests.parallel.pipeline.by_peers import by_megatron, by_torch

SIZES = "mode=tp tp=1 heads=6 kv_heads=3 hidden=24 ffn=42 vocab=389 seq=9 batch=2 steps=2 lr=0.1"
CASES = (
    "pp=2 layers=3 first_layers=2 micro=3",
    "pp=3 layers=6 micro=3 schedule=interleaved chunks=2",
    "pp=4 layers=5 last_layers=2 micro=6",
    "pp=2 dp=3 layers=2 micro=3",
)
COST = "some CPU seconds each"
OF_MEGATRON = ("pp=4 layers=4 micro=2 tied=false", "pp=2 dp=3 layers=2 micro=3 zero=1")
"""Fewer micro-batches than stages, which torch refuses; calls after a step, beside which torch's own would be seen."""


@pytest.mark.peers
@pytest.mark.parametrize("words", [CASES[0], *deep(COST, *CASES[1:], *OF_MEGATRON)])
def test_megatrons_schedules_pass_every_check(prover: Prover, words: str) -> None:
    """1F1B and interleaved of Megatron-Core 0.16.1: gradients, and every message of the closed form."""
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    result = prover.proof(Case.parse(f"{SIZES} {words}"), by_megatron)
    assert [verdict.message for verdict in result.verdicts if verdict.verdict != PASS] == []
    assert "ledger" in {verdict.check for verdict in result.verdicts}


@pytest.mark.parametrize("words", [CASES[1], *deep(COST, CASES[0], *CASES[2:], "pp=2 layers=2 micro=3 schedule=gpipe")])
def test_torchs_schedules_agree_on_shapes_first(prover: Prover, words: str) -> None:
    """torch.distributed.pipelining: every number, and every message of activations and gradients, is ours.

    Before its first micro-batch it has more calls, of bytes and int32: stages agree on how to learn shapes.
    """
    case = Case.parse(f"{SIZES} {words}")
    result = prover.proof(case, by_torch)
    assert [verdict.check for verdict in result.verdicts if verdict.verdict != PASS] == ["ledger"]
    found, expected = Counter[tuple[object, ...]](), Counter[tuple[object, ...]]()
    for event in result.events:
        if event.dtype == case.dtype:
            found[event.rank, event.phase, event.region, event.op, event.axis, event.payload_bytes] += 1
    for rank in range(case.world_size):
        for term in ours.expected(case):
            if term.dtype == case.dtype and all(axis_rank(case, axis, rank) == at for axis, at in term.at.items()):
                expected[rank, term.phase, term.region, term.op, term.axis, term.payload_bytes] += term.calls
    assert found == expected
    assert any(event.dtype == "int32" and event.phase == "pipeline" for event in result.events)
