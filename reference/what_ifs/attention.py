"""What-ifs of attention whose heads are exchanged for sequence: what moves, or comes back, otherwise.

Keys as in `reference.what_ifs.inputs`. Letters: B rows, S tokens, s = S/p, N query heads, K kv heads, D head dim, p
ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reference.case import Case
from reference.language.modes import MODES
from reference.model import layers
from reference.model.decoder import Arithmetic
from reference.training.activations import observe

_Move = Callable[[Tensor, int], Tensor]
"""[B, S, heads, ...] of all ranks and p -> the same, moved otherwise."""


def exchanged(case: Case, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Activations and their gradients when heads are exchanged for sequence otherwise; {} where they are not."""
    if not MODES[case.mode].gathers_weights or case.tp == 1:
        return {}
    parts = case.tp
    found: dict[str, Tensor] = {}
    readings = {
        "flat_dim.joined": _both_ways(parts, _joined_tokens, _joined_heads),
        "flat_dim.cut": _both_ways(parts, _cut_heads, _cut_tokens),
    }
    if case.rows > 1:
        readings["transposed.q"] = _rows_mixed
    if case.kv_heads < parts:
        readings["kv_alone"] = _one_copy(parts)
        if case.kv_heads > 1:
            readings["kv_order"] = _other_order(parts)
    for word, attention in readings.items():
        outcome = observe(case, weights, arithmetic=Arithmetic(attention=attention))
        found |= {f"{word}/{name}": tensor for name, tensor in outcome.items()}
    return found


_Attention = Callable[..., Tensor]


def _both_ways(parts: int, to_heads: _Move, to_tokens: _Move) -> _Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
        kv = torch.stack((k, v), 2).movedim(3, 2)  # kv heads where the heads of q are; k and v lie outside of them
        kv = kv.repeat_interleave(max(1, parts // k.shape[2]), 2)
        k, v = to_heads(kv, parts).unbind(3)
        context = layers.attention(to_heads(q, parts), k, v, visible, *factors).unflatten(-1, (q.shape[2], -1))
        return to_tokens(context, parts).flatten(2)

    return attention


def _joined_tokens(x: Tensor, parts: int) -> Tensor:
    """Read each part of the heads, which arrives source by source, as rows of tokens."""
    own = [part.unflatten(1, (parts, -1)).movedim(1, 0).reshape(part.shape) for part in x.chunk(parts, 2)]
    return torch.cat(own, 2)


def _joined_heads(x: Tensor, parts: int) -> Tensor:
    """Read each part of the tokens, which comes back source by source, as heads side by side."""
    own = [torch.stack(part.chunk(parts, 2)).reshape(part.shape) for part in x.chunk(parts, 1)]
    return torch.cat(own, 1)


def _cut_heads(x: Tensor, parts: int) -> Tensor:
    """Each rank's tokens are cut along dim 0 of memory, not along the heads."""
    sent = [_flat_parts(part, 2, parts) for part in x.chunk(parts, 1)]
    return torch.cat([torch.cat([own[i] for own in sent], 1) for i in range(parts)], 2)


def _cut_tokens(x: Tensor, parts: int) -> Tensor:
    """Each rank's heads are cut along dim 0 of memory, not along the tokens."""
    sent = [_flat_parts(part, 1, parts) for part in x.chunk(parts, 2)]
    return torch.cat([torch.cat([own[i] for own in sent], 2) for i in range(parts)], 1)


def _flat_parts(x: Tensor, dim: int, parts: int) -> tuple[Tensor, ...]:
    """Equal parts of flat memory in the shape of parts along `dim`; k and v lie outside of their heads there."""
    shape = list(x.shape)
    shape[dim] //= parts
    if x.dim() == 4:
        return x.reshape(parts, *shape).unbind()
    shape[2], shape[3] = shape[3], shape[2]
    return x.transpose(2, 3).reshape(parts, *shape).transpose(3, 4).unbind()


def _rows_mixed(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
    return layers.attention(q.transpose(0, 1).reshape(q.shape), k, v, visible, *factors)


def _one_copy(parts: int) -> _Attention:
    """Of the copies of a kv head the first alone gets a gradient."""

    def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
        copies = parts // k.shape[2]
        k, v = (torch.stack([x, *[x.detach()] * (copies - 1)], 3).flatten(2, 3) for x in (k, v))
        return layers.attention(q, k, v, visible, *factors)

    return attention


def _other_order(parts: int) -> _Attention:
    """All kv heads are repeated one after the other, where each should stand beside its copies."""

    def attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
        k, v = (x.repeat(1, 1, parts // x.shape[2], 1) for x in (k, v))
        return layers.attention(q, k, v, visible, *factors)

    return attention
