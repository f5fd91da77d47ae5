"""Rows for the tests of context parallelism, dense attention over them, and the same on in-process ranks."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardproof.parallel.communication.batch import hidden_pairs
from shardproof.parallel.communication.layout import Mesh
from shardproof.parallel.context.blocks import Slices, contiguous, slice_row, zigzag
from shardproof.parallel.context.scheme import exchanged_attention, gathered_attention, ring_attention
from shardproof.reference.case import Case
from shardproof.reference.model.layers import attention, visible
from tests.parallel.ranks import CPU, Calls, numbers, on_ranks

Method = Callable[..., Tensor]
"""Attention of one rank: (q, k, v, axis=, slices=) -> context."""
METHODS: dict[str, Method] = {
    "ring": ring_attention,
    "ring awaited": partial(ring_attention, overlap=False),
    "gathered": gathered_attention,
    "exchanged": exchanged_attention,
}
NAMES = ("context", "grad of q", "grad of k", "grad of v")


def full_row(rows: int, length: int, heads: int, kv_heads: int, *, dim: int = 3, seed: int = 0) -> list[Tensor]:
    """q, k and v of whole rows, large enough that attention weights are far from equal."""
    return [2 * numbers(rows, length, n, dim, seed=seed + i) for i, n in enumerate((heads, kv_heads, kv_heads))]


def borders(*lengths: int) -> Tensor:
    """cu_seqlens of documents of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0)


def hidden(length: int, cu_seqlens: Tensor | None, padding: int = 0) -> Tensor | None:
    """The mask of documents and of the last `padding` tokens, which see nothing and are not seen; None for causal."""
    if cu_seqlens is None:
        return None
    mask = hidden_pairs(length, cu_seqlens, CPU)[0]
    mask[:, length - padding :] = True
    mask[..., length - padding :] = True
    return mask


def ordered(order: str, length: int, ranks: int) -> tuple[Tensor, ...]:
    """The places of every rank in this order, zigzag or contiguous."""
    return (zigzag if order == "zigzag" else contiguous)(length, ranks)


def backward(context: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The context, and the gradients of q, k, v when the gradient of the context is the cosine of the context."""
    return [context.detach(), *torch.autograd.grad(context, (q, k, v), context.detach().cos())]


def dense(full: list[Tensor], cu_seqlens: Tensor | None = None, padding: int = 0) -> list[Tensor]:
    """Context and gradients (`backward`) by the dense model's attention.

    They are 0 for the last `padding` tokens, which see nothing and are not seen.
    """
    length = full[0].shape[1] - padding
    q, k, v = (x[:, :length].clone().requires_grad_() for x in full)
    found = backward(attention(q, k, v, visible(length, cu_seqlens, CPU)).unflatten(2, q.shape[2:]), q, k, v)
    return [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in found]


def on_axis(method: Method, full: list[Tensor], slices: Slices, *, observer: Calls | None = None) -> list[Tensor]:
    """Context and gradients by a method on as many ranks as there are slices, put together again."""
    ranks = len(slices.held)
    case = Case.of(tp=ranks, heads=ranks, kv_heads=ranks, hidden=2 * ranks, ffn=ranks)

    def program(rank: int) -> list[Tensor]:
        axis = Mesh.of(case).axis("tp")
        q, k, v = (slice_row(x, slices.held[axis.rank]).requires_grad_() for x in full)
        return backward(method(q, k, v, axis=axis, slices=slices), q, k, v)

    parts = zip(*on_ranks(ranks, program, observer=observer), strict=True)
    return [together(each, slices.held) for each in parts]


def error(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """The largest absolute error of each of NAMES; inf if it is NaN."""
    distances = (float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    return {name: math.inf if math.isnan(far) else far for name, far in zip(NAMES, distances, strict=True)}


def wrong(found: list[Tensor], expected: list[Tensor], *, limit: float = 1e-12) -> list[str]:
    """Those of NAMES that differ by more than `limit`."""
    return [name for name, far in error(found, expected).items() if far > limit]


def together(parts: Sequence[Tensor], held: Sequence[Tensor]) -> Tensor:
    """The row from the parts of all ranks: the inverse of `slice_row`."""
    return torch.cat([*parts], 1).index_select(1, torch.cat([*held]).argsort())


def work(slices: Slices, rank: int, owner: int) -> int:
    """The number of pairs of a query of `rank` and a key of `owner` that it sees."""
    return int(slices.visible(slices.held[rank], slices.held[owner]).sum())
