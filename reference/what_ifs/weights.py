"""What-ifs of the weights: activations when rows of fused weights, modules or layers are taken for others.

Letters: K kv groups of G query heads, D head dim.
"""

import re
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.what_ifs.what_if import Weights, WhatIf, by_weights


def _layer_before(case: Case, weights: Weights) -> dict[str, Weights]:
    """The parameters of the layer before; of the first layer, and outside of layers, the own ones."""

    def before(name: str) -> str:
        return re.sub(r"^layers\.(\d+)", lambda found: f"layers.{max(0, int(found[1]) - 1)}", name)

    return {"layer": {name: weights.get(before(name), own) for name, own in weights.items()}} if case.layers > 1 else {}


def _kv_exchanged(case: Case, weights: Weights) -> dict[str, Weights]:
    if case.fuse_qkv:
        order = [*range(case.heads // case.kv_heads), -1, -2]
        return {"": _rows(weights, "wqkv", lambda rows: _grouped(case, rows)[:, order].flatten(0, 2))}
    return {"": _exchanged_names(weights, "wk", "wv")}


def _gate_exchanged(case: Case, weights: Weights) -> dict[str, Weights]:
    if case.fuse_mlp:
        return {"": _rows(weights, "w13", lambda rows: torch.cat(rows.chunk(2)[::-1]))}
    return {"": _exchanged_names(weights, "w1", "w3")} if case.activation == "swiglu" else {}


def _cut_otherwise(case: Case, weights: Weights) -> dict[str, Weights]:
    found = {}
    if case.fuse_qkv:
        for parts in {1, case.tp} if case.kv_heads > 1 and case.kv_heads % case.tp == 0 else {1}:
            found[f"qkv{parts}"] = _rows(weights, "wqkv", partial(_as_blocks, case, parts))
    if case.fuse_mlp and case.tp > 1:
        found["w13"] = _rows(weights, "w13", partial(_as_one, case.tp))
    return found


def _exchanged_names(weights: Weights, one: str, other: str) -> Weights:
    """The weights with these two modules of every layer exchanged."""
    names = {one: other, other: one}
    return {n: weights[re.sub(rf"\.({one}|{other})\.", lambda found: f".{names[found[1]]}.", n)] for n in weights}


def _rows(weights: Weights, leaf: str, change: Callable[[Tensor], Tensor]) -> Weights:
    """The weights with the rows of every module of this name changed, of its bias too."""
    return {name: change(w) if f".{leaf}." in name else w for name, w in weights.items()}


def _grouped(case: Case, rows: Tensor) -> Tensor:
    """Rows of a fused projection as [K, G + 2, D, ...]: a group's queries, its key, its value."""
    grouped: Tensor = rows.unflatten(0, (case.kv_heads, case.heads // case.kv_heads + 2, -1))
    return grouped


def _as_blocks(case: Case, parts: int, rows: Tensor) -> Tensor:
    """Rows that give, cut by groups, what each part gives when it is cut into all q, all k and all v."""
    group, groups = case.heads // case.kv_heads, case.kv_heads // parts
    taken = []
    for part in _grouped(case, rows).flatten(0, 1).chunk(parts):
        q, k, v = part.split([group * groups, groups, groups])
        taken.append(torch.cat([q.unflatten(0, (groups, group)), k[:, None], v[:, None]], 1))
    return torch.cat(taken).flatten(0, 2)


def _as_one(parts: int, rows: Tensor) -> Tensor:
    """Rows that give, cut into gate and up, what parts of the whole give that are each cut into gate and up."""
    pieces = rows.chunk(2 * parts)
    return torch.cat([*pieces[0::2], *pieces[1::2]])


WHAT_IFS = (
    WhatIf("stale", "when every layer has the weights of the layer before", by_weights(_layer_before)),
    WhatIf("kv_exchanged", "when keys and values are exchanged", by_weights(_kv_exchanged)),
    WhatIf("gate_exchanged", "when gate and up are exchanged", by_weights(_gate_exchanged)),
    WhatIf("fused_cut", "when a fused weight is cut into other blocks than its rows form", by_weights(_cut_otherwise)),
)
