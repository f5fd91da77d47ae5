"""Sequence-parallel attention by all-to-all: heads are exchanged for sequence around the core, and back.

Letters: p ranks of the axis; B rows, s = S/p of this rank's tokens, S all tokens of a row. N query heads, K kv heads, D
head dim. With p > K every kv head is repeated p/K times first, so that each rank gets one; backward sums the copies.

    tensor   | forward                                            | backward       | one rank's send
    q        | [B, s, N, D] -> [B, S, N/p, D]         all_to_all  | all_to_all     | B*s*N*D
    k and v  | [B, s, 2, K, D] -> [B, S, 2, K/p, D]   all_to_all  | all_to_all     | B*s*2*max(K, p)*D
    context  | [B, S, N/p, D] -> [B, s, N, D]         all_to_all  | all_to_all     | B*s*N*D

q travels while k and v are packed; both have arrived before the core starts. The core sees whole rows, so packed rows
keep their borders. Query head n reads kv head n // (N/K): rank r gets consecutive heads of both kinds, hence the pairs
stay together. Sources: arXiv:2309.14509; InternEvo `DistributedAttention`, kv-packed (modes.md 3.5).
"""

from typing import Any

import torch
from torch import Tensor

from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.collectives import start_all_to_all
from shardproof.parallel.communication.mesh import Axis
from shardproof.parallel.layers.attention import Core, Exchange

_SEQUENCE, _HEADS, _KV_HEADS = 1, 2, 3
"""Dims: sequence, heads of q and of the context, heads of k and v packed as [B, s, 2, K, D]."""


class _ToHeads(torch.autograd.Function):
    """q, k, v of this rank's tokens and all heads -> q, k, v of all tokens and this rank's heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
        ctx.axis, ctx.copies = axis, max(1, axis.size // k.shape[_HEADS])
        q_pending = start_all_to_all(q, axis, split_dim=_HEADS, gather_dim=_SEQUENCE)
        kv = torch.stack((k, v), 2).repeat_interleave(ctx.copies, _KV_HEADS)
        kv_pending = start_all_to_all(kv, axis, split_dim=_KV_HEADS, gather_dim=_SEQUENCE)
        q_own, (k_own, v_own) = q_pending.wait(), kv_pending.wait().unbind(2)
        return q_own, k_own, v_own

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_pending = start_all_to_all(grad_q, ctx.axis, split_dim=_SEQUENCE, gather_dim=_HEADS)
        grad_kv = torch.stack((grad_k, grad_v), 2)
        kv_pending = start_all_to_all(grad_kv, ctx.axis, split_dim=_SEQUENCE, gather_dim=_KV_HEADS)
        copies = kv_pending.wait().unflatten(_KV_HEADS, (-1, ctx.copies))
        k_all, v_all = copies.sum(_KV_HEADS + 1).unbind(2)
        return q_pending.wait(), k_all, v_all, None


def by_all_to_all(axis: Axis) -> Exchange:
    """The exchange over this axis: (core, q [B,s,N,D], k and v [B,s,K,D]) -> context [B,s,N,D]."""

    def exchange(core: Core, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if axis.size == 1:
            return core(q, k, v)
        context = core(*_ToHeads.apply(q, k, v, axis))
        return pairs.all_to_all(context, axis, split_dim=_SEQUENCE, gather_dim=_HEADS)

    return exchange
