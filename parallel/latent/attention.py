"""Latent attention of this rank's heads: short latents that every rank has, projected to whole heads.

Letters: tokens x width; h hidden, Lq and Lk latents of queries and of keys with values; p ranks of the axis tp. dr are
the rotary features of a key, the same for all heads. Latents and rotary keys between the two projections:

    down projection | hidden states | how they come to all ranks               | backward
    duplicated      | whole         | every rank computes them                 | rotary keys: all-reduce
    duplicated      | split         | of its tokens; rotary keys: all-gather   | rotary keys: reduce-scatter
    column          | whole         | columns, all-gather of features          | rotary keys: all-reduce; own slice
    column          | split         | the same; latents: own tokens            | the same, and latents: all-gather

A latent enters the up projection as hidden states enter a column linear, so that its gradient comes back complete. A
rotary key serves the heads of every rank, and each rank computes its own heads' part of the gradient. So the sum over
tp is due exactly once, before anything upstream of the key. Source: arXiv:2405.04434; Megatron-Core 0.16.1
`MLASelfAttention` (experts.md 23.2). Megatron leaves the sum out but for duplicated projections with split hidden
states.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel.communication import pairs
from parallel.layers.attention import Attention
from parallel.layers.linear import Region


class Duplicated(nn.Module):
    """A linear that is whole on every rank, of the tokens that the rank has."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[:1], dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[.., .., in] -> [.., .., out]."""
        return functional.linear(x, self.weight, self.bias)


class LatentAttention(Attention):
    """The attention of `parallel.layers.attention` with other projections.

    They hold `wdq`, `q_latent_norm` and `wuq`, or `wq`; `wdkv`, `kv_latent_norm`, `wukv`; `wo`. A head has `rotary`
    last features that positions turn, a value `value` features. `columns`: the down projections return all features of
    all tokens, else whole features of the tokens that hidden states have here.
    """

    wdq: nn.Module
    q_latent_norm: nn.Module
    wuq: nn.Module
    wdkv: nn.Module
    kv_latent_norm: nn.Module
    wukv: nn.Module
    region: Region
    rotary: int
    value: int
    columns: bool
    latent_queries: bool

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [.., .., N, D], v [.., .., N, E] of this rank's heads, in the layout of hidden states."""
        dim = self.heads.dim
        latent = self.wdq(x) if self.latent_queries else self.wq(x)
        kv_latent, turned = self._entering(self.wdkv(x))
        q = self.wuq(self.q_latent_norm(self._own_tokens(latent))) if self.latent_queries else latent
        kv = self.wukv(self.kv_latent_norm(kv_latent)).unflatten(-1, (-1, dim - self.rotary + self.value))
        k, v = kv.split((dim - self.rotary, self.value), -1)
        k = torch.cat((k, turned[..., None, :].expand(*k.shape[:-1], -1)), -1)
        return q.unflatten(-1, (-1, dim)), k, v

    def _entering(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """The latent of keys and values as hidden states lie, and the rotary keys of all tokens."""
        latent, turned = joined.split((joined.shape[-1] - self.rotary, self.rotary), -1)
        axis, dim = self.region.axis, self.region.sequence_dim
        if self.columns or dim is None:
            return self._own_tokens(latent), pairs.copy_to(turned, axis)
        return latent, pairs.gather_from_sequence(turned, axis, dim=dim)

    def _own_tokens(self, latent: Tensor) -> Tensor:
        """A latent of the tokens that hidden states have here."""
        if not self.columns or self.region.sequence_dim is None:
            return latent
        return pairs.scatter_to_sequence(latent, self.region.axis, dim=self.region.sequence_dim)
