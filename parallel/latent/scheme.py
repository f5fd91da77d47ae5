"""Latent attention as a scheme: what the words `kv_lora_rank q_lora_rank latent_down` replace of a strategy.

    replaced     | by
    branches     | the attention of every layer
    placements   | down projections of latent_down=column are split by rows
    partial      | those of latent_down=duplicated have seen the tokens of one rank where these are split
    activation   | latents beside the heads, which lie as those of the plain attention
    rows         | the calls of the table in `parallel.latent.attention`; up projections are column linears

Context ranks exchange keys and values of one width: there values are filled with zeros up to that of a key.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel.communication.expectation import CallRow, in_modules
from parallel.communication.layout import Cut, Placement, local_shape
from parallel.communication.mesh import Mesh
from parallel.latent.attention import Duplicated, LatentAttention
from parallel.layers.attention import HeadShape, MaskedCore
from parallel.layers.linear import ColumnLinear, Region
from parallel.layers.norm import Norm
from parallel.layers.roles import ATTENTION, with_widths
from parallel.model.strategy import Parts, Strategy
from parallel.randomness.dropout import Dropout
from parallel.schemes.tensor import COLUMNS, GATHERED_AGAIN, SPLIT_COLUMNS
from reference.case import Case
from reference.model.parameters import dtype_of, shapes

AFTER = ("context", "pipeline")
_DOWN = ("wdq", "wdkv")
_LATENTS = ("wdq", "wdkv", "q_latent_norm", "kv_latent_norm")
_QUERIES, _KEYS = "slice_tokens * q_lora_rank", "slice_tokens * kv_lora_rank"
_JOINED, _ROTARY = "slice_tokens * (kv_lora_rank + qk_rope_dim)", "slice_tokens * qk_rope_dim"


def applied(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with latent attention in every layer; itself without."""
    if not case.kv_lora_rank:
        return strategy
    columns, split = case.latent_down == "column", case.system.sequence

    def parts(case: Case, mesh: Mesh, device: torch.device) -> Parts:
        return _parts(case, mesh, device, strategy, placements(case))

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
        assert place is not None  # every mode states where hidden states lie
        width = shapes(case)[f"{module}.weight"][0]
        whole = columns and leaf in _DOWN
        cuts = tuple(cut for cut in place.cuts if not (whole and cut.axis == "tp"))
        return replace(place, shape=(*place.shape[:2], width), cuts=cuts)

    return replace(
        strategy,
        parts=parts,
        placements=placements,
        partial=is_partial,
        activation=activation,
        rows=(*strategy.rows, *_rows(columns=columns, split=split)),
    )


def _leaf(name: str) -> str:
    """The last part of a parameter's module."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _parts(case: Case, mesh: Mesh, device: torch.device, strategy: Strategy, places: Mapping[str, Placement]) -> Parts:
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
            _filled(parts.core, case) if case.sliced else parts.core,
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


def _filled(core: MaskedCore, case: Case) -> MaskedCore:
    """The core with values filled with zeros up to the width of a key."""

    def filled(q: Tensor, k: Tensor, v: Tensor, hidden_B1SS: Tensor | None, keep: Tensor | None) -> Tensor:
        wider = functional.pad(v, (0, k.shape[-1] - case.value_dim))
        return core(q, k, wider, hidden_B1SS, keep)[..., : case.value_dim]

    return filled


def _rows(*, columns: bool, split: bool) -> Iterator[CallRow]:
    """The calls of both projections to latents and of the rotary keys."""
    gradient = "gradient of the rotary keys, partial: each rank has that of its heads"
    if columns:
        for rows in (SPLIT_COLUMNS, GATHERED_AGAIN[:1]) if split else (COLUMNS,):
            yield from (replace(row, where=with_widths(_down)) for row in rows)
        yield CallRow(in_modules(_named("wdq")), "forward", "all_gather", _QUERIES, "columns of the latent")
        yield CallRow(in_modules(_named("wdkv")), "forward", "all_gather", _JOINED, "columns of latent and rotary keys")
    if columns and split:
        why = "gradients of the latent's own tokens"
        yield CallRow(ATTENTION, "backward", "all_gather", _QUERIES, why, when="q_lora_rank")
        yield CallRow(ATTENTION, "backward", "all_gather", _KEYS, why)
    if split and not columns:
        yield CallRow(ATTENTION, "forward", "all_gather", _ROTARY, "rotary keys of all tokens")
        yield CallRow(ATTENTION, "backward", "reduce_scatter", _ROTARY, f"{gradient} -> split")
    else:
        yield CallRow(ATTENTION, "backward", "all_reduce", _ROTARY, gradient)


def _named(leaf: str) -> Callable[[Case], Iterator[str]]:
    """The modules of this name in every attention."""
    return lambda case: (name for name in _down(case) if name.endswith(f".{leaf}"))


def _down(case: Case) -> Iterator[str]:
    """The projections to latents."""
    return (name.removesuffix(".weight") for name in shapes(case) if _leaf(name) in _DOWN and name.endswith("weight"))
