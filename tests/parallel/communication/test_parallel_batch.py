"""Tests of communication/batch and communication/collectives. Batches to the ranks: who reads and what is sent; the
raw collectives on one rank and on memory that is strided.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.parallel.communication import batch as delivery
from shardproof.parallel.communication import collectives
from shardproof.parallel.communication.batch import Delivered, deliver, hidden_pairs
from shardproof.parallel.communication.layout import Axis, Mesh
from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch, micro_batch
from tests.parallel.ranks import CPU, Calls, along_tp, numbers, on_ranks

TP, DP = 3, 2
BASE = Case.parse(f"tp={TP} dp={DP} heads=6 kv_heads=3 hidden=12 ffn=12 seq=7 batch=2 vocab=40")


def _delivered(case: Case, calls: Calls | None = None) -> list[Delivered]:
    return on_ranks(case.world_size, lambda rank: deliver(case, Mesh.of(case), 1, case.micro - 1, CPU), observer=calls)


N, MASK = BASE.tokens, BASE.batch * BASE.seq**2
TEXT = PLACES = (8 * N, "int64")
SENT = {
    "delivery=tensors attention_mask=true tp=3": [TEXT, TEXT, (4 * N, "float32"), (MASK, "bool"), PLACES],
    "delivery=tensors attention_mask=false tp=1": [TEXT, TEXT, (4 * N, "float32"), PLACES],
    "delivery=flat attention_mask=true tp=1": [(8 * 25, "int64"), (8 * (4 * N + MASK), "int64")],
    "delivery=flat attention_mask=false tp=3": [(8 * 20, "int64"), (8 * 4 * N, "int64")],
}


@pytest.mark.parametrize("words", SENT)
def test_the_broadcasts_are_megatrons_on_any_number_of_ranks(words: str) -> None:
    case, calls = Case.parse(f"{BASE} {words}"), Calls()
    _delivered(case, calls)
    for rank in range(case.world_size):
        assert [(call.payload_bytes, call.dtype) for call in calls.by_rank[rank]] == SENT[words]
        assert {(call.op, len(call.group)) for call in calls.by_rank[rank]} == {("broadcast", case.tp)}


@pytest.mark.parametrize(("words", "readers"), [("tensors", {0, 3}), ("flat", {0, 3}), ("local", set(range(6)))])
def test_only_the_first_rank_of_tp_reads_what_is_broadcast(
    words: str, readers: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, read = BASE.but(delivery=words), set()

    def program(rank: int) -> Delivered:
        mesh = Mesh.of(case)

        def noted(case: Case, step: int, micro: int, dp_rank: int) -> Batch:
            read.add((mesh.axis("tp").rank, dp_rank))
            return micro_batch(case, step, micro, dp_rank)

        monkeypatch.setattr(delivery, "micro_batch", noted)
        return deliver(case, mesh, 0, 0, CPU)

    on_ranks(case.world_size, program)
    assert {dp_rank * TP + tp_rank for tp_rank, dp_rank in read} == readers


def test_a_fractional_loss_mask_survives_the_flat_int64_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BASE.but(delivery="flat")
    odd = torch.tensor([0.1, -2.5, 3e-41, 1e30] * 4, dtype=torch.float32)[: case.tokens].view(case.batch, case.seq)

    def weighted(*place: Any) -> Batch:
        return replace(micro_batch(*place), loss_mask=odd)

    monkeypatch.setattr(delivery, "micro_batch", weighted)
    for found in _delivered(case):
        assert torch.equal(found.loss_mask, odd)


def test_hidden_pairs_of_a_written_example() -> None:
    hidden = hidden_pairs(4, torch.tensor([0, 1, 4]), CPU)[0, 0].int().tolist()
    assert hidden == [[0, 1, 1, 1], [1, 0, 1, 1], [1, 0, 0, 1], [1, 0, 0, 0]]


RANKS = 3
FULL = numbers(6, 9, 12)


def _strided(x: Tensor) -> Tensor:
    """The same numbers in memory without a contiguous dim."""
    return torch.stack((x, -x), -1)[..., 0]


@pytest.mark.parametrize(("op", "expected"), [("sum", FULL * 6), ("max", torch.maximum(FULL, FULL * 3))])
def test_all_reduce_of_strided_memory_returns_the_reduction_and_leaves_its_input(op: str, expected: Tensor) -> None:
    def program(axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
        mine = _strided(FULL * (axis.rank + 1))
        before = mine.clone()
        return collectives.all_reduce(mine, axis, op=op), mine, before

    for reduced, mine, before in along_tp(RANKS, program):
        torch.testing.assert_close(reduced, expected, rtol=1e-14, atol=0)
        assert torch.equal(mine, before)


def test_one_rank_issues_nothing_but_the_broadcast() -> None:
    calls = Calls()

    def program(axis: Axis) -> list[Tensor]:
        return [
            collectives.all_reduce(FULL, axis),
            collectives.all_gather(FULL, axis, dim=1),
            collectives.reduce_scatter(FULL, axis, dim=1),
            collectives.all_to_all(FULL, axis, split_dim=0, gather_dim=1),
            collectives.own_slice(FULL, axis, dim=0),
            collectives.broadcast(FULL, axis),
        ]

    (results,) = along_tp(1, program, observer=calls)
    assert all(torch.equal(result, FULL) for result in results)
    assert calls.ops() == ["broadcast"]


def test_unknown_axes_worlds_of_another_size_and_uneven_parts_are_refused() -> None:
    def program(axis: Axis) -> str:
        with pytest.raises(ValueError, match="axis=wp: is not an axis.*legal: tp cp dp pp"):
            Mesh.of(Case.of(tp=2)).axis("wp")
        with pytest.raises(ValueError, match="world_size=2: the case needs .*=4 ranks"):
            Mesh.of(Case.of(tp=4, kv_heads=4))
        with pytest.raises(ValueError, match="dim=0: its length 3 must be a multiple of the 2 ranks.*legal: 4"):
            collectives.own_slice(numbers(3, 2), axis, dim=0)
        return "raised"

    assert along_tp(2, program) == ["raised", "raised"]
