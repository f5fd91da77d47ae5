"""Conjugacy: every pair keeps the logical tensor forward and the logical gradient backward, in its documented layouts.

Layouts of a logical tensor X over p ranks: `whole` (everyone holds X), `partial` (the ranks' tensors sum to X), an int
(everyone holds its slice along that dim). A pair is right when laying X out, moving it and reading it back gives X,
and when the same holds for the gradient on the way back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parallel_ranks import along_tp, numbers
from torch import Tensor

from parallel import pairs
from parallel.collectives import own_slice
from parallel.mesh import Axis

Layout = str | int
RANKS = 3
X, GRADIENT = numbers(3, 6, 9, seed=1), numbers(3, 6, 9, seed=2)

PAIRS: dict[str, tuple[Callable[[Tensor, Axis], Tensor], Layout, Layout, Layout, Layout]] = {
    "copy_to": (pairs.copy_to, "whole", "whole", "partial", "whole"),
    "reduce_from": (pairs.reduce_from, "partial", "whole", "whole", "whole"),
    "scatter_to": (pairs.scatter_to, "whole", 2, 2, "whole"),
    "gather_from": (pairs.gather_from, 2, "whole", "whole", 2),
    "scatter_to_sequence": (lambda x, a: pairs.scatter_to_sequence(x, a, dim=1), "whole", 1, 1, "whole"),
    "gather_from_sequence": (lambda x, a: pairs.gather_from_sequence(x, a, dim=1), 1, "whole", "partial", 1),
    "gather_from_sequence, not tensor parallel behind": (
        lambda x, a: pairs.gather_from_sequence(x, a, dim=1, tensor_parallel_output_grad=False),
        1,
        "whole",
        "whole",
        1,
    ),
    "reduce_scatter_to_sequence": (
        lambda x, a: pairs.reduce_scatter_to_sequence(x, a, dim=0),
        "partial",
        0,
        0,
        "whole",
    ),
    "all_gather_last_dim": (pairs.all_gather_last_dim, 2, "whole", "partial", 2),
    "reduce_scatter_last_dim": (pairs.reduce_scatter_last_dim, "partial", 2, 2, "whole"),
    "all_to_all": (lambda x, a: pairs.all_to_all(x, a, split_dim=2, gather_dim=1), 1, 2, 2, 1),
}
"""Name -> (pair, layout of its input, of its output, of the output's gradient, of the input's gradient)."""


def _laid(full: Tensor, layout: Layout, axis: Axis) -> Tensor:
    if layout == "whole":
        return full.clone()
    if layout == "partial":
        weights = torch.tensor([0.7, -0.4, 0.7], dtype=full.dtype)
        return full * weights[axis.rank]
    assert isinstance(layout, int)
    return own_slice(full, axis, dim=layout)


def _read(locals_: list[Tensor], layout: Layout) -> Tensor:
    if layout == "whole":
        assert all(torch.equal(local, locals_[0]) for local in locals_)
        return locals_[0]
    if layout == "partial":
        return torch.stack(locals_).sum(0)
    assert isinstance(layout, int)
    return torch.cat(locals_, layout)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("strided", [False, True])
def test_forward_and_backward_keep_the_logical_tensor(name: str, strided: bool) -> None:
    pair, into, out, gradient_in, gradient_out = PAIRS[name]

    def program(axis: Axis) -> tuple[Tensor, Tensor]:
        x, gradient = _laid(X, into, axis), _laid(GRADIENT, gradient_in, axis)
        if strided:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
            gradient = gradient.transpose(0, 1).contiguous().transpose(0, 1)
        x.requires_grad_()
        y = pair(x, axis)
        (y * gradient).sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    results = along_tp(RANKS, program)
    torch.testing.assert_close(_read([y for y, _ in results], out), X, rtol=1e-13, atol=1e-14)
    gradients = [gradient for _, gradient in results]
    torch.testing.assert_close(_read(gradients, gradient_out), GRADIENT, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_on_one_rank_is_nothing(name: str) -> None:
    pair = PAIRS[name][0]

    def program(axis: Axis) -> bool:
        return pair(X, axis) is X

    assert along_tp(1, program) == [True]


def test_the_moved_tensor_is_not_the_input_that_autograd_knows() -> None:
    """An identity forward that returned its very input would hide the backward collective from in-place users."""

    def program(axis: Axis) -> Tensor:
        x = X.clone().requires_grad_()
        y = pairs.copy_to(x, axis)
        (y * (axis.rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad

    for gradient in along_tp(2, program):
        assert torch.equal(gradient, torch.full_like(X, 3.0))
