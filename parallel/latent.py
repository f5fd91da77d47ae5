"""Latent attention as a scheme: what the words `kv_lora_rank q_lora_rank latent_down` replace of a strategy.

    replaced     | by
    branches     | the attention of every layer
    placements   | down projections are split by rows with latent_down=column
    partial      | the gradients of duplicated down projections, if hidden states are split
    activation   | the latents: they lie as hidden states do; with latent_down=column they are whole before their norms
    rows         | the calls of the table below; those of column linears for up projections, and for column down ones

Down projections make short latents, one of queries and one of keys with values, and the rotary features of a key, which
are the same for all heads. Every rank projects the latents up to its own heads. So it needs all features of both:

    down projection | hidden states | forward                                      | backward
    duplicated      | whole         | every rank computes all                      | rotary keys: all-reduce
    duplicated      | split         | own tokens; rotary keys: all-gather          | rotary keys: reduce-scatter
    column          | whole         | own features, all-gather                     | rotary keys: all-reduce; own slice
    column          | split         | the same, then latents: slice of own tokens  | the same, latents: all-gather first

A latent enters the up projection as hidden states enter a column linear, and so its gradient comes back complete. A
rotary key serves the heads of all ranks, and each rank computes the part of the gradient that its own heads give. This
gradient is summed over tp once, before it goes further back. Source: arXiv:2405.04434; Megatron-Core 0.16.1
`MLASelfAttention` (experts.md 23.2). Megatron sums only for duplicated projections with split hidden states.

Context ranks exchange keys and values of one width: values are filled with zeros up to the width of a key.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.expectation import CallRow, in_modules
from shardproof.parallel.communication.layout import Cut, Mesh, Placement, local_shape
from shardproof.parallel.layers.attention import Attention, HeadShape, MaskedCore
from shardproof.parallel.layers.block import Norm
from shardproof.parallel.layers.linear import ColumnLinear, Region
from shardproof.parallel.layers.randomness import Dropout
from shardproof.parallel.layers.roles import ATTENTION, with_widths
from shardproof.parallel.model.strategy import Parts, Strategy
from shardproof.parallel.schemes.tensor import COLUMNS, GATHERED_AGAIN, SPLIT_COLUMNS
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of, shapes


class Duplicated(nn.Module):
    """A linear with its whole weight on every rank, applied to the tokens that the rank has."""

    def __init__(self, shape: tuple[int, ...], *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[:1], dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[.., .., in] -> [.., .., out]."""
        return functional.linear(x, self.weight, self.bias)


class LatentAttention(Attention):
    """The attention of `parallel.layers.attention` with other projections.

    These are `wdq`, `q_latent_norm` and `wuq`, or `wq`; `wdkv`, `kv_latent_norm`, `wukv`; `wo`. Positions turn the last
    `rotary` features of a head; a value has `value` features. With `columns` the down projections return all features
    of all tokens, otherwise those of the tokens whose hidden states are here.
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

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [.., .., N, D], v [.., .., N, E] of this rank's heads, dims in the order of hidden states."""
        dim = self.heads.dim
        latent = self.wdq(x) if self.latent_queries else self.wq(x)
        kv_latent, turned = self._enter_latent(self.wdkv(x))
        q = self.wuq(self.q_latent_norm(self._own_tokens(latent))) if self.latent_queries else latent
        kv = self.wukv(self.kv_latent_norm(kv_latent)).unflatten(-1, (-1, dim - self.rotary + self.value))
        k, v = kv.split((dim - self.rotary, self.value), -1)
        k = torch.cat((k, turned[..., None, :].expand(*k.shape[:-1], -1)), -1)
        return q.unflatten(-1, (-1, dim)), k, v

    def _enter_latent(self, joined: Tensor) -> tuple[Tensor, Tensor]:
        """The latent of keys and values, which lies as hidden states do, and the rotary keys of all tokens."""
        latent, turned = joined.split((joined.shape[-1] - self.rotary, self.rotary), -1)
        axis, dim = self.region.axis, self.region.sequence_dim
        if self.columns or dim is None:
            return self._own_tokens(latent), pairs.copy_to(turned, axis)
        return latent, pairs.gather_from_sequence(turned, axis, dim=dim)

    def _own_tokens(self, latent: Tensor) -> Tensor:
        """The part of a latent for the tokens whose hidden states are here."""
        if not self.columns or self.region.sequence_dim is None:
            return latent
        return pairs.scatter_to_sequence(latent, self.region.axis, dim=self.region.sequence_dim)


AFTER = ("context", "pipeline")
_DOWN = ("wdq", "wdkv")
_LATENTS = ("wdq", "wdkv", "q_latent_norm", "kv_latent_norm")
_QUERIES, _KEYS = "slice_tokens * q_lora_rank", "slice_tokens * kv_lora_rank"
_JOINED, _ROTARY = "slice_tokens * (kv_lora_rank + qk_rope_dim)", "slice_tokens * qk_rope_dim"


def apply(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with latent attention in every layer; unchanged if the case has none."""
    if not case.kv_lora_rank:
        return strategy
    columns, split = case.latent_down == "column", case.system.sequence

    def placements(case: Case) -> dict[str, Placement]:
        places = strategy.placements(case)
        down = {name: place for name, place in places.items() if columns and _leaf(name) in _DOWN}
        return {**places, **{name: replace(place, cuts=(*place.cuts, Cut(axis="tp"))) for name, place in down.items()}}

    def is_partial(case: Case, name: str) -> bool:
        return strategy.partial(case, name) or (split and not columns and _leaf(name) in _DOWN)

    def activation(case: Case, module: str) -> Placement | None:
        leaf = module.rpartition(".")[2]
        if leaf not in _LATENTS:
            return strategy.activation(case, module)
        place = strategy.activation(case, "embedding")
        assert place is not None  # every mode says how hidden states lie
        width = shapes(case)[f"{module}.weight"][0]
        whole = columns and leaf in _DOWN
        cuts = tuple(cut for cut in place.cuts if not (whole and cut.axis == "tp"))
        return replace(place, shape=(*place.shape[:2], width), cuts=cuts)

    return replace(
        strategy,
        parts=partial(_parts, strategy, placements(case)),
        placements=placements,
        partial=is_partial,
        activation=activation,
        rows=(*strategy.rows, *_rows(columns=columns, split=split)),
    )


def _leaf(name: str) -> str:
    """The last part of the name of a parameter's module."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _parts(strategy: Strategy, places: Mapping[str, Placement], case: Case, mesh: Mesh, device: torch.device) -> Parts:
    parts, dtype = strategy.parts(case, mesh, device), dtype_of(case)
    region = Region(
        axis=mesh.axis("tp"), sequence_dim=strategy.sequence_dim if case.system.sequence else None, overlap=case.overlap
    )
    columns = case.latent_down == "column"

    def module(name: str) -> nn.Module:
        shape = local_shape(places[f"{name}.weight"], mesh.coordinates)
        if name.endswith("norm"):
            return Norm(shape[0], bias=case.norm == "layernorm", dtype=dtype, device=device)
        if name.rpartition(".")[2] not in _DOWN:
            return parts.linear(name)
        if columns:
            return ColumnLinear(shape, region, bias=case.bias, dtype=dtype, device=device, gather_output=True)
        return Duplicated(shape, bias=case.bias, dtype=dtype, device=device)

    def attention(name: str, dropout: Dropout) -> nn.Module:
        inside = [one.removesuffix(".weight") for one in places if one.startswith(f"{name}.") and "weight" in one]
        heads = HeadShape(
            group=1, dim=case.head_dim, sequence_dim=strategy.sequence_dim, recompute_core=case.core_again
        )
        made = LatentAttention(
            heads,
            _pad_values(parts.core, case) if case.is_sliced else parts.core,
            parts.exchange,
            {one.rpartition(".")[2]: module(one) for one in inside},
            {},
            name.rpartition(".")[0],
            dropout,
        )
        made.region, made.columns, made.latent_queries = region, columns, bool(case.q_lora_rank)
        made.rotary, made.value = case.rotated_dim, case.value_dim
        return made

    return replace(parts, branches={**parts.branches, "latent": attention})


def _pad_values(core: MaskedCore, case: Case) -> MaskedCore:
    """The core with values filled with zeros up to the width of a key."""

    def attend_filled(q: Tensor, k: Tensor, v: Tensor, hidden_B1SS: Tensor | None, keep: Tensor | None) -> Tensor:
        wider = functional.pad(v, (0, k.shape[-1] - case.value_dim))
        return core(q, k, wider, hidden_B1SS, keep)[..., : case.value_dim]

    return attend_filled


def _rows(*, columns: bool, split: bool) -> Iterator[CallRow]:
    """The calls of the down projections and of the rotary keys."""
    gradient = "gradient of the rotary keys, partial: each rank has that of its heads"
    if columns:
        for rows in (SPLIT_COLUMNS, GATHERED_AGAIN[:1]) if split else (COLUMNS,):
            yield from (replace(row, where=with_widths(partial(_down, _DOWN))) for row in rows)
        for leaf, elements, what in (("wdq", _QUERIES, "the latent"), ("wdkv", _JOINED, "latent and rotary keys")):
            yield CallRow(in_modules(partial(_down, [leaf])), "forward", "all_gather", elements, f"columns of {what}")
    if columns and split:
        why = "gradients of the latent's own tokens"
        yield CallRow(ATTENTION, "backward", "all_gather", _QUERIES, why, when="q_lora_rank")
        yield CallRow(ATTENTION, "backward", "all_gather", _KEYS, why)
    if split and not columns:
        yield CallRow(ATTENTION, "forward", "all_gather", _ROTARY, "rotary keys of all tokens")
        yield CallRow(ATTENTION, "backward", "reduce_scatter", _ROTARY, f"{gradient} -> split")
    else:
        yield CallRow(ATTENTION, "backward", "all_reduce", _ROTARY, gradient)


def _down(leaves: Sequence[str], case: Case) -> Iterator[str]:
    """The dotted names of the down projections with these last parts, in all layers."""
    return (name.removesuffix(".weight") for name in shapes(case) if _leaf(name) in leaves and name.endswith("weight"))
