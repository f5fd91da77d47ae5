"""Column linears in forms that no case has, against the dense one."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel.communication.collectives import own_slice
from parallel.communication.mesh import Axis
from parallel.layers.linear import ColumnLinear, Region
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
    assert linear.bias is not None
    with torch.no_grad():
        linear.weight.copy_(own_slice(WEIGHT, axis, dim=0))
        linear.bias.copy_(own_slice(BIAS, axis, dim=0))
    return linear


def _close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_gathered_output_is_the_dense_linear_on_every_rank() -> None:
    dense = _dense()
    for result in along_tp(RANKS, lambda axis: _run(_column(axis, Region(axis=axis), gather_output=True), X, GRADIENT)):
        _close(result.y, dense.y)
        _close(result.x, dense.x)


@pytest.mark.parametrize(("split", "ops"), [(None, ["all_reduce"]), (0, ["all_gather", "reduce_scatter"])])
def test_a_frozen_weight_still_reduces_the_input_gradient_and_gathers_nothing_again(
    split: int | None, ops: list[str]
) -> None:
    calls = Calls()

    def program(axis: Axis) -> Tensor:
        linear = _column(axis, Region(axis=axis, sequence_dim=split))
        linear.weight.requires_grad_(False)
        return _run(linear, X if split is None else own_slice(X, axis, dim=split), own_slice(GRADIENT, axis, dim=2)).x

    found = along_tp(RANKS, program, observer=calls)
    assert calls.ops() == ops
    _close(found[0] if split is None else torch.cat(found, 0), _dense().x)


def test_an_input_that_needs_no_gradient_sends_none() -> None:
    calls = Calls()

    def program(axis: Axis) -> Tensor | None:
        linear = _column(axis, Region(axis=axis))
        (linear(X) * own_slice(GRADIENT, axis, dim=2)).sum().backward()
        return linear.weight.grad

    found = along_tp(RANKS, program, observer=calls)
    assert calls.ops() == []
    _close(torch.cat([gradient for gradient in found if gradient is not None]), _dense().weight)
