"""Embeddings split along the vocabulary or hidden, and the head, against the dense lookup and product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallel.communication.layout import Cut, Placement, gather, local_shape, meshgrid, shard
from parallel.communication.mesh import Axis
from parallel.layers.embedding import Head, HiddenEmbedding, VocabularyEmbedding, vocabulary_rows
from parallel.layers.linear import Region
from tests.parallel.ranks import CPU, Calls, along_tp, numbers

RANKS, VOCAB, PADDED, WIDTH, SEQ = 3, 10, 15, 6, 6
TOKENS = torch.tensor([[9, 0, 4, 5, 4, 1], [3, 9, 9, 2, 8, 7]])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]])
TABLE, LEARNED = numbers(VOCAB, WIDTH), numbers(SEQ, WIDTH, seed=1)
GRADIENT_BSD = numbers(2, SEQ, WIDTH, seed=2)
PLACE = Placement(shape=(VOCAB, WIDTH), cuts=(Cut(axis="tp", blocks=(PADDED,)),))
COLUMNS = Placement(shape=(VOCAB, WIDTH), cuts=(Cut(axis="tp", dim=1),))


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("sequence_dim", [0, 1])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(("kind", "place"), [(VocabularyEmbedding, PLACE), (HiddenEmbedding, COLUMNS)])
def test_embedding_is_the_dense_lookup(
    kind: type[VocabularyEmbedding | HiddenEmbedding], place: Placement, learned: bool, sequence_dim: int, split: bool
) -> None:
    calls = Calls()

    def program(axis: Axis) -> tuple[Tensor, Tensor | None, Tensor | None]:
        region = Region(axis=axis, sequence_dim=sequence_dim if split else None)
        module = kind(
            local_shape(place, {"tp": (0, axis.size)}),
            (SEQ, WIDTH) if learned else None,
            region,
            sequence_dim=sequence_dim,
            dtype=TABLE.dtype,
            device=CPU,
        )
        with torch.no_grad():
            module.tokens.weight.copy_(shard(TABLE, place, {"tp": (axis.rank, axis.size)}))
            if module.positions is not None:
                module.positions.weight.copy_(LEARNED)
        x = module(TOKENS, POSITIONS)
        gradient = GRADIENT_BSD.transpose(0, 1) if sequence_dim == 0 else GRADIENT_BSD
        if split:
            gradient = gradient.chunk(axis.size, sequence_dim)[axis.rank]
        (x * gradient).sum().backward()
        positions = None if module.positions is None else module.positions.weight.grad
        return x.detach(), module.tokens.weight.grad, positions

    results = along_tp(RANKS, program, observer=calls)
    table, positions = TABLE.clone().requires_grad_(), LEARNED.clone().requires_grad_()
    expected = table[TOKENS] + (positions[POSITIONS] if learned else 0)
    (expected * GRADIENT_BSD).sum().backward()
    expected = expected.detach().transpose(0, 1) if sequence_dim == 0 else expected.detach()
    whole = torch.cat([x for x, _, _ in results], sequence_dim) if split else results[0][0]
    torch.testing.assert_close(whole, expected, rtol=1e-13, atol=1e-13)
    gradients = [gradient for _, gradient, _ in results if gradient is not None]
    torch.testing.assert_close(
        gather(zip(meshgrid({"tp": RANKS}), gradients, strict=True), place), table.grad, rtol=1e-13, atol=1e-13
    )
    if place is PLACE:
        assert torch.equal(torch.cat(gradients)[VOCAB:], torch.zeros(PADDED - VOCAB, WIDTH, dtype=TABLE.dtype))
    for _, _, gradient in results if learned else ():
        torch.testing.assert_close(gradient, positions.grad, rtol=1e-13, atol=1e-13)
    into = "all_reduce" if learned or not split else "reduce_scatter"
    into = "all_gather" if place is COLUMNS else into
    assert calls.ops() == ([into, "all_gather"] if split else [into])
    assert {call.payload_bytes for call in calls.by_rank[0]} == {GRADIENT_BSD.numel() * 8}


def test_rows_outside_a_rank_are_zero_and_send_no_gradient_to_row_zero() -> None:
    weight = numbers(5, WIDTH).requires_grad_()
    found = vocabulary_rows(torch.tensor([4, 5, 9, 10]), weight, 5)
    assert torch.equal(found.detach()[[0, 3]], torch.zeros(2, WIDTH, dtype=weight.dtype))
    assert torch.equal(found.detach()[1:3], weight.detach()[[0, 4]])
    found.sum().backward()
    assert weight.grad is not None
    assert weight.grad.sum(1).tolist() == [WIDTH, 0, 0, 0, WIDTH]


@pytest.mark.parametrize("gather_output", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_head_gives_the_dense_logits_and_its_gradient_to_the_weight_it_used(gather_output: bool, tied: bool) -> None:
    x_SBD = numbers(SEQ, 2, WIDTH, seed=3)

    def program(axis: Axis) -> tuple[Tensor, Tensor | None]:
        own = shard(TABLE, PLACE, {"tp": (axis.rank, axis.size)})
        head = Head(
            None if tied else tuple(own.shape),
            Region(axis=axis),
            vocab=VOCAB,
            gather_output=gather_output,
            dtype=TABLE.dtype,
            device=CPU,
        )
        other = own.clone().requires_grad_()
        if head.weight is not None:
            with torch.no_grad():
                head.weight.copy_(own)
                other.zero_()
        logits = head(x_SBD, other)
        logits[..., :VOCAB].square().sum().backward()
        weight = other if head.weight is None else head.weight
        return logits.detach(), weight.grad

    table = TABLE.clone().requires_grad_()
    dense = x_SBD @ table.t()
    dense.square().sum().backward()
    results = along_tp(RANKS, program)
    whole = results[0][0] if gather_output else torch.cat([logits for logits, _ in results], -1)[..., :VOCAB]
    assert results[0][0].shape[-1] == (VOCAB if gather_output else PADDED // RANKS)
    torch.testing.assert_close(whole, dense.detach(), rtol=1e-13, atol=1e-13)
    gradients = [gradient for _, gradient in results if gradient is not None]
    gathered = gather(zip(meshgrid({"tp": RANKS}), gradients, strict=True), PLACE)
    torch.testing.assert_close(gathered, table.grad, rtol=1e-12, atol=1e-12)
