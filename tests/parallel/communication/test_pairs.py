"""The law of every conjugate pair: it keeps the logical tensor forward and the logical gradient backward.

Layouts of a logical tensor X over p ranks: `whole` (everyone holds X), `partial` (the ranks' tensors sum to X), an int
(everyone holds its slice along that dim), `uneven` (slices of the last dim, each of another width). A pair is right
when laying X out, moving it and reading it back gives X, and when the same holds for the gradient on its way back.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.engines.engine import Engine
from parallel.communication import pairs
from parallel.communication.mesh import Axis
from suites.session.prover import Prover

Layout = str | int
Pair = Callable[[Tensor, Axis], Tensor]
RANKS = 3
_WEIGHTS = (0.7, -0.4, 0.7)
"""Unequal terms, of both signs, whose sum is 1."""

_WIDTHS = [4, 2, 3]
_HELD = ((range(0, 1), range(1, 4)), (range(4, 6),), (range(6, 9),))

PAIRS: dict[str, tuple[Callable[[ModuleType], Pair], Layout, Layout, Layout, Layout]] = {
    "copy_to": (lambda m: m.copy_to, "whole", "whole", "partial", "whole"),
    "reduce_from": (lambda m: m.reduce_from, "partial", "whole", "whole", "whole"),
    "scatter_to": (lambda m: m.scatter_to, "whole", 2, 2, "whole"),
    "gather_from": (lambda m: m.gather_from, 2, "whole", "whole", 2),
    "scatter_to_sequence": (lambda m: lambda x, a: m.scatter_to_sequence(x, a, dim=1), "whole", 1, 1, "whole"),
    "gather_from_sequence": (lambda m: lambda x, a: m.gather_from_sequence(x, a, dim=1), 1, "whole", "partial", 1),
    "gather_from_sequence, nothing parallel behind": (
        lambda m: lambda x, a: m.gather_from_sequence(x, a, dim=1, tensor_parallel_output_grad=False),
        1,
        "whole",
        "whole",
        1,
    ),
    "reduce_scatter_to_sequence": (
        lambda m: lambda x, a: m.reduce_scatter_to_sequence(x, a, dim=0),
        "partial",
        0,
        0,
        "whole",
    ),
    "all_gather_last_dim": (lambda m: m.all_gather_last_dim, 2, "whole", "partial", 2),
    "reduce_scatter_last_dim": (lambda m: m.reduce_scatter_last_dim, "partial", 2, 2, "whole"),
    "own_part": (lambda m: lambda x, a: m.own_part(x, a, _HELD[a.rank]), "whole", "uneven", "uneven", "whole"),
    "gather_parts": (lambda m: lambda x, a: m.gather_parts(x, a, _WIDTHS), "uneven", "whole", "whole", "uneven"),
    "all_to_all": (lambda m: lambda x, a: m.all_to_all(x, a, split_dim=2, gather_dim=1), 1, 2, 2, 1),
}
"""Name -> (pair of such a module, layouts of its input, its output, the output's gradient, the input's)."""


def broken_pairs(pairs: ModuleType, engine: Engine, *, strided: bool = False) -> list[str]:
    """The names of the pairs of this module that break the law; `strided` hands them non-contiguous tensors."""
    return [name for name in PAIRS if not _kept(name, pairs, engine, strided)]


def _kept(name: str, pairs: ModuleType, engine: Engine, strided: bool) -> bool:
    x, gradient, results = moved(name, pairs, engine, strided)
    _, _, out, _, gradient_out = PAIRS[name]
    forward = _read([y for y, _ in results], out)
    backward = _read([grad for _, grad in results], gradient_out)
    return _close(forward, x) and _close(backward, gradient)


def moved(
    name: str, pairs: ModuleType, engine: Engine, strided: bool
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """The logical tensor and gradient, and by rank the pair's output and the gradient in its input."""
    generator = torch.Generator().manual_seed(7)
    x, gradient = (torch.randn(3, 6, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    pair, into, _, gradient_in, _ = PAIRS[name]

    def program(rank: int) -> tuple[Tensor, Tensor]:
        group = dist.new_group(list(range(RANKS)), group_desc="tp")
        axis = Axis(name="tp", ranks=tuple(range(RANKS)), rank=rank, group=group)
        mine, upstream = _laid(x, into, axis), _laid(gradient, gradient_in, axis)
        if strided:
            mine, upstream = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (mine, upstream))
        mine.requires_grad_()
        y = pair(pairs)(mine, axis)
        (y * upstream).sum().backward()
        assert mine.grad is not None
        return y.detach(), mine.grad

    return x, gradient, engine.run(program, world_size=RANKS)


def _laid(full: Tensor, layout: Layout, axis: Axis) -> Tensor:
    """One rank's tensor of a logical one, made without the code under test."""
    if layout == "whole":
        return full.clone()
    if layout == "partial":
        return full * _WEIGHTS[axis.rank]
    if layout == "uneven":
        return full[..., sum(_WIDTHS[: axis.rank]) :][..., : _WIDTHS[axis.rank]].clone()
    assert isinstance(layout, int)
    return full.chunk(axis.size, layout)[axis.rank].clone()


def _read(locals_: list[Tensor], layout: Layout) -> Tensor | None:
    """The logical tensor of the ranks' own; None when ranks disagree on one that all should hold."""
    if layout == "whole":
        return locals_[0] if all(torch.equal(local, locals_[0]) for local in locals_) else None
    if layout == "partial":
        return torch.stack(locals_).sum(0)
    if layout == "uneven":
        return torch.cat(locals_, 2)
    assert isinstance(layout, int)
    return torch.cat(locals_, layout)


def _close(value: Tensor | None, truth: Tensor) -> bool:
    return value is not None and value.shape == truth.shape and torch.allclose(value, truth, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("strided", [False, True])
def test_every_pair_keeps_its_law(prover: Prover, strided: bool) -> None:
    assert broken_pairs(pairs, prover.engine, strided=strided) == []


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_on_one_rank_is_nothing(prover: Prover, name: str) -> None:
    x = torch.ones(3, 6, 9)
    axis = Axis(name="tp", ranks=(0,), rank=0, group=None)
    assert PAIRS[name][0](pairs)(x, axis) is x


def test_the_moved_tensor_is_not_the_input_that_autograd_knows(prover: Prover) -> None:
    """An identity forward that returned its very input would hide the backward collective from in-place users."""

    def program(rank: int) -> Tensor:
        group = dist.new_group([0, 1], group_desc="tp")
        x = torch.ones(3, requires_grad=True)
        y = pairs.copy_to(x, Axis(name="tp", ranks=(0, 1), rank=rank, group=group))
        (y * (rank + 1)).sum().backward()
        assert x.grad is not None
        return x.grad

    for gradient in prover.engine.run(program, world_size=2):
        assert torch.equal(gradient, torch.full((3,), 3.0))
