"""Query, key and value, gate and up: one tensor or several, under the names of the dense model.

    attention.wqkv   per kv group: its queries, its key, its value      attention.wq, .wk, .wv
    mlp.w13          gate, then up                                      mlp.w1, .w3

Both ways are exact. Biases go as the rows of their weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["joined", "parted"]


def parted(tensors: Mapping[str, Tensor], kv_heads: int) -> dict[str, Tensor]:
    """Every fused tensor as its parts. Raises KeyError for a wqkv without the wo beside it, which gives its heads."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        layer, _, last = module.rpartition(".")
        if last == "wqkv":
            queries = tensors[f"{layer}.wo.weight"].shape[1]
            width = (len(tensor) - queries) // 2 // kv_heads
            groups = tensor.reshape(kv_heads, -1, width, *tensor.shape[1:])
            for part, rows in (("wq", groups[:, :-2]), ("wk", groups[:, -2]), ("wv", groups[:, -1])):
                found[f"{layer}.{part}.{leaf}"] = rows.reshape(-1, *tensor.shape[1:])
        elif last == "w13":
            found[f"{layer}.w1.{leaf}"], found[f"{layer}.w3.{leaf}"] = tensor.chunk(2)
        else:
            found[name] = tensor
    return found


def joined(tensors: Mapping[str, Tensor], kv_heads: int, *, qkv: bool, mlp: bool) -> dict[str, Tensor]:
    """The parts of queries, keys and values (`qkv`), of gate and up (`mlp`), as one tensor each."""
    found = dict(tensors)
    for name in [name for name in tensors if qkv and ".wq." in name]:
        parts = [found.pop(name.replace(".wq.", f".{part}.")) for part in ("wq", "wk", "wv")]
        groups = [part.reshape(kv_heads, -1, *part.shape[1:]) for part in parts]
        found[name.replace(".wq.", ".wqkv.")] = torch.cat(groups, 1).flatten(0, 1)
    for name in [name for name in tensors if mlp and ".w3." in name]:
        gate = found.pop(name.replace(".w3.", ".w1."))
        found[name.replace(".w3.", ".w13.")] = torch.cat([gate, found.pop(name)])
    return found
