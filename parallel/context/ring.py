"""Ring attention: every rank keeps its queries, while the keys and values of all ranks go round.

Letters: c ranks; K elements of one rank's keys, b * (s/c) * kv_heads * head_dim, and as many of its values. Gradients
are in the dtype of statistics. Keys and values of one rank travel together, as one block.

    step of rank r       0        1        2       ..  c-1      then
    computes with        r        r-1      r-2         r+1                all modulo c
    forward hops         k, v  -> k, v  -> ..      -> k, v      -         c-1 sends and receives of 2K
    backward hops        k, v  -> k, v  -> ..      -> k, v      -         c-1 sends and receives of 2K
                                  dk, dv -> dk, dv -> dk, dv -> home      c   sends and receives of 2K, wide

A hop sends to the next rank and receives from the one before, both in one batch: no rank waits for another one's
receive. The next block is under way while this one is computed with. Heads are repeated for their groups after a hop,
never before; rotated keys travel rotated. The gradient of a block follows the block one step behind it and collects
what every rank adds. After c hops it is back at the block's owner.

Every rank gets every block, also those that none of its queries may see. Slices of unequal length give messages of
unequal length; an empty block is not sent. Source: arXiv:2310.01889; torch `_templated_ring_attention` and picotron
`context_parallel` (backward as here). TransformerEngine `AttnFuncWithCPAndKVP2P` starts backward from the block of the
last step and turns the other way: c-1 hops bring every gradient home. around.md 14.1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.parallel.communication.collectives import Pending
from shardproof.parallel.communication.expectation import MICRO_BATCHES, CallRow
from shardproof.parallel.communication.mesh import Axis
from shardproof.parallel.context.blocks import attend, gradients, merged, of_keys
from shardproof.parallel.context.slices import Slices
from shardproof.parallel.layers.roles import ATTENTION


def ring_attention(
    q_BqND: Tensor,
    k_BqKD: Tensor,
    v_BqKD: Tensor,
    *,
    axis: Axis,
    slices: Slices,
    keep: Tensor | None = None,
    overlap: bool = True,
) -> Tensor:
    """Attention [B,q,N,D] of this rank's queries over the keys of all ranks.

    `keep` [B,N,q,S] are the factors of dropout, keys in the order of the row.
    """
    context: Tensor = _Ring.apply(q_BqND, k_BqKD, v_BqKD, axis, slices, keep, overlap)
    return context


class _Ring(torch.autograd.Function):
    """The two loops of the table above."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, slices: Slices, keep: Tensor | None, overlap: bool
    ) -> Tensor:
        ctx.axis, ctx.slices, ctx.overlap = axis, slices, overlap
        block, whole, own = torch.stack((k, v)), None, slices.held[axis.rank]
        for step in range(axis.size):
            keys = slices.held[_owner(axis, step)]
            ahead = _hop(block, axis, slices, step, overlap=overlap) if step < axis.size - 1 else None
            part = attend(q, block[0], block[1], slices.visible(own, keys), of_keys(keep, keys))
            whole = part if whole is None else merged(whole, part)
            block = block if ahead is None else ahead.wait()
        assert whole is not None  # an axis has at least this rank
        ctx.save_for_backward(q, k, v, keep, *whole)
        return whole[0].flatten(2, 3).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keep, *whole = ctx.saved_tensors
        axis, slices, own = ctx.axis, ctx.slices, ctx.slices.held[ctx.axis.rank]
        block, grad_q, home = torch.stack((k, v)), torch.zeros_like(whole[0]).flatten(2, 3), None
        for step in range(axis.size):
            keys = slices.held[_owner(axis, step)]
            ahead = _hop(block, axis, slices, step, overlap=ctx.overlap) if step < axis.size - 1 else None
            visible, factors = slices.visible(own, keys), of_keys(keep, keys)
            own_q, *own_kv = gradients(grad, q, block[0], block[1], visible, (whole[0], whole[1]), factors)
            grad_q += own_q
            grad_kv = torch.stack(own_kv) if home is None else home.wait() + torch.stack(own_kv)
            home = _hop(grad_kv, axis, slices, step, overlap=ctx.overlap)
            block = block if ahead is None else ahead.wait()
        assert home is not None  # an axis has at least this rank
        grad_k, grad_v = home.wait().unbind()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def _owner(axis: Axis, step: int) -> int:
    """Whose block this rank computes with in a step."""
    return (axis.rank - step) % axis.size


def _hop(block: Tensor, axis: Axis, slices: Slices, step: int, *, overlap: bool) -> Pending:
    """Begin to send this step's block [2,B,tokens,K,D] to the next rank and to receive the next step's."""
    if axis.size == 1:
        return Pending(None, lambda: block)
    sender, receiver = axis.ranks[axis.rank - 1], axis.ranks[(axis.rank + 1) % axis.size]
    arriving = block.new_empty((*block.shape[:2], len(slices.held[_owner(axis, step + 1)]), *block.shape[3:]))
    messages = [
        dist.P2POp(move, tensor, peer, axis.group)
        for move, tensor, peer in ((dist.isend, block, receiver), (dist.irecv, arriving, sender))
        if tensor.numel()
    ]
    works = dist.batch_isend_irecv(messages) if messages else []

    def arrived() -> Tensor:
        for work in works:
            work.wait()
        return arriving

    if not overlap:
        arrived()
        works = []
    return Pending(None, arrived)


def ring_rows(keys: str, *, axis: str) -> tuple[CallRow, ...]:
    """The messages of equal slices over an axis; `keys` is the formula of the elements K of one rank's keys."""

    block: Callable[..., CallRow] = partial(CallRow, ATTENTION, elements=f"2 * {keys}", axis=axis, again="core")
    follow = partial(block, times=f"(ranks - 1) * {MICRO_BATCHES}", hidden="overlap")
    home = "gradients come home, when nothing is left to compute"
    return tuple(
        row
        for op in ("send", "recv")
        for row in (
            follow("forward backward", op, why="keys and values of the next rank"),
            follow("backward", op, why="gradients follow their keys and values", dtype="loss"),
            block("backward", op, why=home, dtype="loss"),
        )
    )
