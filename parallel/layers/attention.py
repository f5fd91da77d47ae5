"""Self-attention on this rank's heads, whose number follows from the width of its projections.

Letters: B sequences, S tokens, N query heads, K kv heads (N = K*g), D head dim, all of this rank. Between its two
linears attention works on [B, S, heads, D], whatever the layout of hidden states. The core sees whole sequences, or
with context parallelism a slice of each (`parallel.context`). A mode whose hidden states are split along the sequence
gathers them in the column linear, or exchanges heads for sequence around the core (`exchange`). Sources:
arXiv:2104.09864 (rotary, rotate-half pairing as Hugging Face Llama), arXiv:2305.13245 (grouped queries).

The exchange of heads for sequence is an all-to-all. Each of the p ranks of the axis holds s = S/p tokens of a row. With
p > K every kv head is repeated p/K times first, so that each rank gets one; backward sums the copies.

    tensor   | forward                                            | backward       | one rank's send
    q        | [B, s, N, D] -> [B, S, N/p, D]         all_to_all  | all_to_all     | B*s*N*D
    k and v  | [B, s, 2, K, D] -> [B, S, 2, K/p, D]   all_to_all  | all_to_all     | B*s*2*max(K, p)*D
    context  | [B, S, N/p, D] -> [B, s, N, D]         all_to_all  | all_to_all     | B*s*N*D

q travels while k and v are packed; both have arrived before the core starts. The core sees whole rows, so packed rows
keep their borders. Query head n reads kv head n // (N/K). A rank gets consecutive heads of both kinds, so it has the kv
head of each of its query heads. Sources: arXiv:2309.14509; InternEvo `DistributedAttention`, kv-packed (modes.md 3.5).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.collectives import start_all_to_all
from shardproof.parallel.communication.layout import Axis
from shardproof.parallel.layers.block import wide
from shardproof.parallel.layers.randomness import Draw, Dropout

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B,S,N,D], k and v [B,S,K,D] of whole sequences -> context [B,S,N,D]."""
MaskedCore = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""A core with a mask, bool [B or 1, 1, S, S] of whole rows, true where a token is hidden; None means causal.

The last argument holds the factors of dropout on the shares, [B, N, q, S] with the keys of whole rows, or None.
"""
Exchange = Callable[[Core, Tensor, Tensor, Tensor], Tensor]
"""A function that exchanges tensors around the core: (core, q, k, v) -> context in the layout of q."""
_ROTARY_BASE = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """`group` query heads per kv head, `dim` features each. `recompute_core`: backward computes the core again."""

    group: int
    dim: int
    sequence_dim: int
    recompute_core: bool = False


def no_exchange(core: Core, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No exchange, for modes whose ranks see whole sequences."""
    return core(q, k, v)


def rotary_table(positions_BS: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, S, 1, D/2] of position / base^(2i/D), angles in float64."""
    half = dim // 2
    power = torch.arange(half, dtype=torch.float64, device=positions_BS.device) / half
    angle = (positions_BS[..., None] / _ROTARY_BASE**power)[:, :, None]
    return angle.cos().to(wide(dtype)), angle.sin().to(wide(dtype))


def rotate(x_BSND: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pair (i, i + D/2) of every head by its position's angle. In a head that is wider than the table's D only
    the last D features turn.
    """
    cos, sin = table
    if plain := x_BSND.shape[-1] - 2 * cos.shape[-1]:
        return torch.cat((x_BSND[..., :plain], rotate(x_BSND[..., plain:], table)), -1)
    first, second = x_BSND.to(cos.dtype).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x_BSND.dtype)


def core_attention(
    q_BSND: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, hidden_B1SS: Tensor | None, keep_BNSS: Tensor | None = None
) -> Tensor:
    """Softmax attention with grouped queries, [B, S, N, D]. `hidden_B1SS` is true where a token must not be seen;
    None means causal. `keep_BNSS` are factors of the shares."""
    group = q_BSND.shape[2] // k_BSKD.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSKD, v_BSKD))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    visible = None if hidden_B1SS is None else ~hidden_B1SS
    if keep_BNSS is not None:
        score = (q @ k.mT).to(wide(q.dtype)) / math.sqrt(q.shape[-1])
        index = torch.arange(q.shape[2], device=q.device)
        seen = index[:, None] >= index[None, :] if visible is None else visible
        share = score.masked_fill(~seen, -math.inf).softmax(-1)
        return ((share * keep_BNSS).to(q.dtype) @ v).transpose(1, 2)
    context = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None)
    return context.transpose(1, 2)


class Attention(nn.Module):
    """Projections, optional q/k norms, rotary positions, core, output projection.

    `projections` holds `wqkv`, or `wq`, `wk` and `wv`, and `wo`; `norms` holds `q_norm` and `k_norm` or nothing.
    """

    wqkv: nn.Module
    wq: nn.Module
    wk: nn.Module
    wv: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    wo: nn.Module

    def __init__(
        self,
        heads: HeadShape,
        core: MaskedCore,
        exchange: Exchange,
        projections: dict[str, nn.Module],
        norms: dict[str, nn.Module],
        name: str,
        dropout: Dropout,
    ) -> None:
        super().__init__()
        self.name, self.dropout = name, dropout
        self.heads, self.core, self.exchange = heads, core, exchange
        self.fused, self.normed = "wqkv" in projections, bool(norms)
        for leaf, module in (projections | norms).items():
            self.add_module(leaf, module)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor] | None, hidden_B1SS: Tensor | None, draw: Draw) -> Tensor:
        """Hidden states -> hidden states; `table` is None without rotary positions, `draw` the step and micro-batch."""
        q, k, v = self._project(x)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.heads.sequence_dim == 0:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        if table is not None:
            q, k = rotate(q, table), rotate(k, table)

        def attend_dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.core(q, k, v, hidden_B1SS, self.dropout.shares(f"{self.name}.attention", draw, wide(q.dtype)))

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.heads.recompute_core:
                # No early stop: a core that ends with a collective repeats it, as Megatron's checkpoint does.
                context: Tensor = checkpoint(
                    attend_dropped,
                    q,
                    k,
                    v,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=self.dropout.contexts,
                    early_stop=False,
                )
                return context
            return attend_dropped(q, k, v)

        context = self.exchange(core, q, k, v).flatten(2)
        if self.heads.sequence_dim == 0:
            context = context.transpose(0, 1)
        y: Tensor = self.wo(context)
        return y

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [.., .., N, D], k and v [.., .., K, D] of this rank's heads, in the layout of hidden states."""
        group, dim = self.heads.group, self.heads.dim
        if not self.fused:
            q, k, v = (w(x).unflatten(-1, (-1, dim)) for w in (self.wq, self.wk, self.wv))
            return q, k, v
        grouped = self.wqkv(x).unflatten(-1, (-1, group + 2, dim))
        return grouped[..., :group, :].flatten(2, 3), grouped[..., group, :], grouped[..., group + 1, :]


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
