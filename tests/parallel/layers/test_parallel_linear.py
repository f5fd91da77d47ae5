"""Column and row linears in forms that no case has, against the dense ones."""

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
    """Output and gradients of a rank."""

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


def _input(axis: Axis, sequence_dim: int | None, full: Tensor) -> Tensor:
    return full if sequence_dim is None else own_slice(full, axis, dim=sequence_dim)


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
