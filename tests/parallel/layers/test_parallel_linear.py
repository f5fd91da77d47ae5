"""Tests of layers/linear. Column linears in forms that no case has, against the dense one; a tie is right for the
metric of every split.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardproof.parallel.communication.collectives import own_slice
from shardproof.parallel.communication.layout import Axis, Cut, Placement, shard
from shardproof.parallel.layers.linear import ColumnLinear, Region
from shardproof.parallel.layers.loss import Metric, MetricSums, token_weights
from tests.parallel.ranks import CPU, Calls, along_tp, numbers

RANKS, IN, OUT = 3, 6, 12
X, WEIGHT, BIAS = numbers(6, 2, IN), numbers(OUT, IN, seed=1), numbers(OUT, seed=2)
GRADIENT = numbers(6, 2, OUT, seed=3)


def _result(linear: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and gradient of the input."""
    x = x.clone().requires_grad_()
    y = linear(x)
    (y * gradient).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def _column(axis: Axis, region: Region, *, gather_output: bool = False) -> ColumnLinear:
    linear = ColumnLinear(
        (OUT // axis.size, IN), region, bias=True, dtype=X.dtype, device=CPU, gather_output=gather_output
    )
    assert linear.bias is not None
    with torch.no_grad():
        linear.weight.copy_(own_slice(WEIGHT, axis, dim=0))
        linear.bias.copy_(own_slice(BIAS, axis, dim=0))
    return linear


DENSE = _result(partial(functional.linear, weight=WEIGHT, bias=BIAS), X, GRADIENT)
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)


def test_gathered_output_is_the_dense_linear_on_every_rank() -> None:
    def program(axis: Axis) -> tuple[Tensor, Tensor]:
        return _result(_column(axis, Region(axis=axis), gather_output=True), X, GRADIENT)

    for found in along_tp(RANKS, program):
        close(found, DENSE)


@pytest.mark.parametrize(("split", "ops"), [(None, ["all_reduce"]), (0, ["all_gather", "reduce_scatter"])])
def test_a_frozen_weight_still_reduces_the_input_gradient_and_gathers_nothing_again(
    split: int | None, ops: list[str]
) -> None:
    calls = Calls()

    def program(axis: Axis) -> Tensor:
        linear = _column(axis, Region(axis=axis, sequence_dim=split))
        linear.weight.requires_grad_(False)
        own = X if split is None else own_slice(X, axis, dim=split)
        return _result(linear, own, own_slice(GRADIENT, axis, dim=2))[1]

    found = along_tp(RANKS, program, observer=calls)
    assert calls.ops() == ops
    close(found[0] if split is None else torch.cat(found, 0), DENSE[1])


def test_an_input_that_needs_no_gradient_sends_none() -> None:
    calls = Calls()

    def program(axis: Axis) -> Tensor | None:
        linear = _column(axis, Region(axis=axis))
        (linear(X) * own_slice(GRADIENT, axis, dim=2)).sum().backward()
        return linear.weight.grad

    found = along_tp(RANKS, program, observer=calls)
    assert calls.ops() == []
    close(torch.cat([gradient for gradient in found if gradient is not None]), torch.einsum("sbo,sbi->oi", GRADIENT, X))


VOCAB, PADDED = 10, 15
LOGITS = torch.zeros(2, 6, VOCAB, dtype=torch.float64)
LABELS = torch.tensor([[9, 0, -100, 5, 4, 1], [3, 9, 8, 2, -100, 7]])
WEIGHTS = token_weights(LABELS, torch.tensor([[1.0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1]])).double()
PLACES = {
    "vocabulary": Placement(shape=LOGITS.shape, cuts=(Cut(axis="tp", dim=2, blocks=(PADDED,)),)),
    "sequence": Placement(shape=LOGITS.shape, cuts=(Cut(axis="tp", dim=1),)),
    "whole": Placement(shape=LOGITS.shape),
}


@pytest.mark.parametrize("form", PLACES)
def test_a_tie_is_right_on_every_split(form: str) -> None:
    place = PLACES[form]

    def program(axis: Axis) -> MetricSums:
        local = shard(LOGITS, place, {"tp": (axis.rank, axis.size)})
        metric = Metric(place, axis, vocab=VOCAB, sequence_dim=1)
        with torch.no_grad():
            metric(local, LABELS, WEIGHTS)
            metric(local, LABELS, WEIGHTS)
        assert metric.total is not None
        return metric.total

    for found in along_tp(RANKS, program):
        assert found.right == found.tokens
        assert float((-found.log_likelihood / found.tokens).exp()) == pytest.approx(VOCAB)
