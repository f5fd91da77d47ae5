"""Column and row linears against the dense linear: values, all gradients, what they save and what they send."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel.communication.collectives import own_slice
from parallel.communication.mesh import Axis
from parallel.layers.linear import ColumnLinear, Region, RowLinear
from tests.parallel.ranks import CPU, Calls, along_tp, numbers

RANKS, IN, OUT = 3, 6, 12
X, WEIGHT, BIAS = numbers(6, 2, IN), numbers(OUT, IN, seed=1), numbers(OUT, seed=2)
GRADIENT = numbers(6, 2, OUT, seed=3)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One rank's output and gradients."""

    y: Tensor
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None


def _dense() -> Result:
    x, weight, bias = (t.clone().requires_grad_() for t in (X, WEIGHT, BIAS))
    y = functional.linear(x, weight, bias)
    (y * GRADIENT).sum().backward()
    return Result(y=y.detach(), x=_grad(x), weight=_grad(weight), bias=_grad(bias))


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def _filled(linear: ColumnLinear | RowLinear, weight: Tensor, bias: Tensor) -> ColumnLinear | RowLinear:
    with torch.no_grad():
        linear.weight.copy_(weight)
        if linear.bias is not None:
            linear.bias.copy_(bias)
    return linear


def _run(linear: nn.Module, x: Tensor, gradient: Tensor) -> Result:
    x = x.clone().requires_grad_()
    y = linear(x)
    (y * gradient).sum().backward()
    gradients = {name: parameter.grad for name, parameter in linear.named_parameters()}
    return Result(y=y.detach(), x=_grad(x), weight=gradients.get("weight"), bias=gradients.get("bias"))


def _column(axis: Axis, region: Region, *, gather_output: bool = False) -> ColumnLinear:
    linear = ColumnLinear(
        (OUT // axis.size, IN), region, bias=True, dtype=X.dtype, device=CPU, gather_output=gather_output
    )
    _filled(linear, own_slice(WEIGHT, axis, dim=0), own_slice(BIAS, axis, dim=0))
    return linear


def _row(axis: Axis, region: Region, *, input_is_parallel: bool = True) -> RowLinear:
    linear = RowLinear(
        (OUT, IN // axis.size), region, bias=True, dtype=X.dtype, device=CPU, input_is_parallel=input_is_parallel
    )
    _filled(linear, own_slice(WEIGHT, axis, dim=1), BIAS)
    return linear


def _close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


FORMS = [(None, False), (0, False), (0, True), (1, False), (1, True)]
"""(sequence dim, keep)."""


def _input(axis: Axis, sequence_dim: int | None, full: Tensor) -> Tensor:
    return full if sequence_dim is None else own_slice(full, axis, dim=sequence_dim)


@pytest.mark.parametrize(("sequence_dim", "keep"), FORMS)
@pytest.mark.parametrize("overlap", [True, False])
def test_column_linear_is_the_dense_linear(sequence_dim: int | None, keep: bool, overlap: bool) -> None:
    ranks = 2 if sequence_dim == 1 else RANKS

    def program(axis: Axis) -> Result:
        region = Region(axis=axis, sequence_dim=sequence_dim, keep=keep, overlap=overlap)
        return _run(_column(axis, region), _input(axis, sequence_dim, X), own_slice(GRADIENT, axis, dim=2))

    dense, results = _dense(), along_tp(ranks, program)
    _close(torch.cat([r.y for r in results], 2), dense.y)
    _close(torch.cat([r.weight for r in results if r.weight is not None]), dense.weight)
    _close(torch.cat([r.bias for r in results if r.bias is not None]), dense.bias)
    for result in results if sequence_dim is None else ():
        _close(result.x, dense.x)
    if sequence_dim is not None:
        _close(torch.cat([r.x for r in results], sequence_dim), dense.x)


@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
def test_row_linear_is_the_dense_linear_with_its_bias_added_once(sequence_dim: int | None) -> None:
    ranks = 2 if sequence_dim == 1 else RANKS

    def program(axis: Axis) -> Result:
        region = Region(axis=axis, sequence_dim=sequence_dim)
        return _run(_row(axis, region), own_slice(X, axis, dim=2), _input(axis, sequence_dim, GRADIENT))

    dense, results = _dense(), along_tp(ranks, program)
    _close(torch.cat([r.x for r in results], 2), dense.x)
    _close(torch.cat([r.weight for r in results if r.weight is not None], 1), dense.weight)
    if sequence_dim is None:
        for result in results:
            _close(result.y, dense.y)
            _close(result.bias, dense.bias)
    else:
        _close(torch.cat([r.y for r in results], sequence_dim), dense.y)
        _close(torch.stack([r.bias for r in results if r.bias is not None]).sum(0), dense.bias)


def test_gathered_output_and_whole_input_are_the_dense_linear_on_every_rank() -> None:
    def program(axis: Axis) -> tuple[Result, Result]:
        region = Region(axis=axis)
        column = _run(_column(axis, region, gather_output=True), X, GRADIENT)
        return column, _run(_row(axis, region, input_is_parallel=False), X, GRADIENT)

    dense = _dense()
    for results in along_tp(RANKS, program):
        for result in results:
            _close(result.y, dense.y)
            _close(result.x, dense.x)


def test_whole_input_under_sequence_parallelism_is_refused() -> None:
    def program(axis: Axis) -> str:
        with pytest.raises(ValueError, match="input_is_parallel=False.*legal: input_is_parallel=True"):
            _row(axis, Region(axis=axis, sequence_dim=0), input_is_parallel=False)
        return "raised"

    assert along_tp(2, program) == ["raised", "raised"]


def test_a_skipped_bias_is_returned_and_not_added() -> None:
    def program(axis: Axis) -> None:
        for linear, x in ((_column(axis, Region(axis=axis)), X), (_row(axis, Region(axis=axis)), X[..., :2])):
            added = linear(x)
            linear.skip_bias_add = True
            bare, bias = linear(x)
            assert bias is linear.bias
            _close(bare + bias, added)
            assert not torch.equal(bare, added)

    along_tp(RANKS, program)


SENT = {
    (None, False): ["all_reduce"],
    (0, False): ["all_gather", "all_gather", "reduce_scatter"],
    (0, True): ["all_gather", "reduce_scatter"],
}


@pytest.mark.parametrize(("form", "ops"), SENT.items())
@pytest.mark.parametrize("overlap", [True, False])
def test_column_linear_sends_the_same_with_and_without_overlap(
    form: tuple[int | None, bool], ops: list[str], overlap: bool
) -> None:
    calls = Calls()

    def program(axis: Axis) -> None:
        region = Region(axis=axis, sequence_dim=form[0], keep=form[1], overlap=overlap)
        _run(_column(axis, region), _input(axis, form[0], X), own_slice(GRADIENT, axis, dim=2))

    along_tp(RANKS, program, observer=calls)
    assert calls.ops() == ops
    assert {call.payload_bytes for call in calls.by_rank[0]} == {X.numel() * 8}
    forward = 0 if form[0] is None else 1
    assert {call.is_async for call in calls.by_rank[0][forward:]} == {overlap}


@pytest.mark.parametrize(
    ("form", "ops"), [((None, False), ["all_reduce"]), ((0, False), ["all_gather", "reduce_scatter"])]
)
def test_a_frozen_weight_still_reduces_the_input_gradient_and_gathers_nothing_again(
    form: tuple[int | None, bool], ops: list[str]
) -> None:
    calls = Calls()

    def program(axis: Axis) -> Tensor:
        linear = _column(axis, Region(axis=axis, sequence_dim=form[0], keep=form[1]))
        linear.weight.requires_grad_(False)
        return _run(linear, _input(axis, form[0], X), own_slice(GRADIENT, axis, dim=2)).x

    found = along_tp(RANKS, program, observer=calls)
    assert calls.ops() == ops
    _close(found[0] if form[0] is None else torch.cat(found, 0), _dense().x)


def test_an_input_that_needs_no_gradient_sends_none() -> None:
    calls = Calls()

    def program(axis: Axis) -> Tensor | None:
        linear = _column(axis, Region(axis=axis))
        (linear(X) * own_slice(GRADIENT, axis, dim=2)).sum().backward()
        return linear.weight.grad

    found = along_tp(RANKS, program, observer=calls)
    assert calls.ops() == []
    _close(torch.cat([gradient for gradient in found if gradient is not None]), _dense().weight)


@pytest.mark.parametrize(("keep", "rows"), [(True, 6), (False, 2)])
def test_the_saved_input_is_the_whole_sequence_only_when_kept(keep: bool, rows: int) -> None:
    """Saved activation per column linear: A when kept (msp), A/p when gathered again (Megatron, fsp)."""

    def program(axis: Axis) -> list[int]:
        saved: list[int] = []
        linear = _column(axis, Region(axis=axis, sequence_dim=0, keep=keep))
        x = own_slice(X, axis, dim=0).requires_grad_()

        def keep_length(tensor: Tensor) -> Tensor:
            saved.append(tensor.shape[0])
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep_length, lambda tensor: tensor):
            linear(x)
        return [length for length in saved if length != OUT // axis.size]

    assert along_tp(RANKS, program) == [[rows]] * RANKS
