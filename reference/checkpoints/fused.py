"""Query, key and value, gate and up: one tensor or several, under the names of the dense model.

    attention.wqkv   per kv group: its queries, its key, its value      attention.wq, .wk, .wv
    mlp.w13          gate, then up                                      mlp.w1, .w3

Both ways are exact. Biases go as the rows of their weights.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class Unfit(ValueError):
    """A folder that does not hold the tensors of one model: says what it holds, and what is legal."""

    def __init__(self, rule: str, legal: str = "the tensors of one model") -> None:
        super().__init__(rule)
        self.rule, self.legal = rule, legal


def parted(tensors: Mapping[str, Tensor], kv_heads: int, *, qkv: bool = True) -> dict[str, Tensor]:
    """Every fused tensor as its parts, or gate and up alone. Raises Unfit where these heads do not fit the tensors."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        layer, _, last = module.rpartition(".")
        if last == "wqkv" and qkv:
            queries, width = _sizes(tensors, name, f"{layer}.wo.weight", kv_heads)
            groups = tensor.reshape(kv_heads, queries // kv_heads // width + 2, width, *tensor.shape[1:])
            for part, rows in (("wq", groups[:, :-2]), ("wk", groups[:, -2]), ("wv", groups[:, -1])):
                found[f"{layer}.{part}.{leaf}"] = rows.reshape(-1, *tensor.shape[1:])
        elif last == "w13":
            if _rows(tensor) % 2:
                raise Unfit(f"holds {name} of {_shape(tensor)}, which is no gate and up")
            found[f"{layer}.w1.{leaf}"], found[f"{layer}.w3.{leaf}"] = tensor.chunk(2)
        else:
            found[name] = tensor
    return found


def joined(tensors: Mapping[str, Tensor], kv_heads: int, *, qkv: bool, mlp: bool) -> dict[str, Tensor]:
    """The parts of queries, keys and values (`qkv`), of gate and up (`mlp`), as one tensor each.

    Raises Unfit for parts that are missing or are not of these heads.
    """
    found = dict(tensors)
    for name in [name for name in tensors if qkv and ".wq." in name]:
        query, key, value = parts = _popped(found, name, ".wq.", ("wq", "wk", "wv"))
        width = _rows(key) // kv_heads if kv_heads > 0 else 0
        fit = width and _rows(key) == width * kv_heads and _rows(query) % (width * kv_heads) == 0
        if not fit or key.shape != value.shape or query.shape[1:] != key.shape[1:]:
            shapes = ", ".join(map(_shape, parts))
            raise Unfit(f"holds {name} and its key and value of {shapes}, which are not of {kv_heads} kv heads")
        groups = [part.reshape(kv_heads, -1, *part.shape[1:]) for part in parts]
        found[name.replace(".wq.", ".wqkv.")] = torch.cat(groups, 1).flatten(0, 1)
    for name in [name for name in tensors if mlp and ".w3." in name]:
        up, gate = _popped(found, name, ".w3.", ("w3", "w1"))
        if up.shape != gate.shape:
            raise Unfit(f"holds {name} of {_shape(up)} and a gate of {_shape(gate)}")
        found[name.replace(".w3.", ".w13.")] = torch.cat([gate, up])
    return found


def kv_heads_of(tensors: Mapping[str, Tensor]) -> int:
    """The key and value heads, where a norm of keys says how wide one is; 0 elsewhere."""
    for name, norm in tensors.items():
        layer, _, last = name.rpartition(".k_norm.")
        if layer and last == "weight" and _rows(norm):
            key, fused, out = (tensors.get(f"{layer}.{part}.weight") for part in ("wk", "wqkv", "wo"))
            if key is None and fused is not None and out is not None and out.dim() == 2:
                return (_rows(fused) - out.shape[1]) // 2 // len(norm)
            return 0 if key is None else _rows(key) // len(norm)
    return 0


def _sizes(tensors: Mapping[str, Tensor], name: str, out: str, kv_heads: int) -> tuple[int, int]:
    """(rows of all queries, rows of a head) of a fused tensor."""
    if out not in tensors or tensors[out].dim() != 2:
        raise Unfit(f"holds {name} and no {out} that says how many rows of it are queries")
    queries = tensors[out].shape[1]
    width, rest = divmod(_rows(tensors[name]) - queries, 2 * kv_heads) if kv_heads > 0 else (0, 0)
    if width < 1 or rest or queries % (width * kv_heads):
        shape = _shape(tensors[name])
        raise Unfit(f"holds {name} of {shape}, of which {queries} rows are queries: these are not {kv_heads} kv heads")
    return queries, width


def _popped(found: dict[str, Tensor], name: str, part: str, others: tuple[str, ...]) -> list[Tensor]:
    names = [name.replace(part, f".{other}.") for other in others]
    if missing := [one for one in names if one not in found]:
        raise Unfit(f"holds {name} without {missing[0]}")
    return [found.pop(one) for one in names]


def _rows(tensor: Tensor) -> int:
    return len(tensor) if tensor.dim() else 0


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"
