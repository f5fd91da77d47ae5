"""What-ifs of attention whose heads are exchanged for sequence: what moves, or comes back, otherwise.

Letters: B rows, S tokens, s = S/p, N query heads, K kv heads, D head dim, p ranks.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.language.modes import MODES
from shardproof.reference.model import layers
from shardproof.reference.what_ifs.tables import flat_columns
from shardproof.reference.what_ifs.what_if import WhatIf, both, by_attention

_Move = Callable[[Tensor, int], Tensor]
"""[B, S, heads, ...] of all ranks and p -> the same, moved otherwise."""


_Attention = Callable[..., Tensor]


def _both_ways(
    parts: int, to_heads: _Move, to_tokens: _Move, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor
) -> Tensor:
    kv = torch.stack((k, v), 2).movedim(3, 2)  # kv heads where the heads of q are; k and v lie outside of them
    kv = kv.repeat_interleave(max(1, parts // k.shape[2]), 2)
    k, v = to_heads(kv, parts).unbind(3)
    context = layers.attention(to_heads(q, parts), k, v, visible, *factors).unflatten(-1, (q.shape[2], -1))
    return to_tokens(context, parts).flatten(2)


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


def _one_copy(parts: int, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
    """Of the copies of a kv head the first alone gets a gradient."""
    copies = parts // k.shape[2]
    k, v = (torch.stack([x, *[x.detach()] * (copies - 1)], 3).flatten(2, 3) for x in (k, v))
    return layers.attention(q, k, v, visible, *factors)


def _other_order(parts: int, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
    """All kv heads are repeated one after the other, where each should stand beside its copies."""
    k, v = (x.repeat(1, 1, parts // x.shape[2], 1) for x in (k, v))
    return layers.attention(q, k, v, visible, *factors)


def exchanges(case: Case) -> bool:
    """Does a case exchange heads for sequence?"""
    return MODES[case.mode].gathers_weights and case.tp > 1


def _flat(case: Case) -> Mapping[str, _Attention]:
    if not exchanges(case):
        return {}
    moves = {"joined": (_joined_tokens, _joined_heads), "cut": (_cut_heads, _cut_tokens)}
    return {reading: partial(_both_ways, case.tp, *both_ways) for reading, both_ways in moves.items()}


def _repeated(case: Case) -> Mapping[str, _Attention]:
    """In each part of the heads all kv heads are repeated one after the other, not each beside its copies."""
    parts = {part for part in (1, case.tp) if case.heads > case.kv_heads > part and case.kv_heads % part == 0}
    return {f"repeated{part}": partial(_in_parts, part) for part in sorted(parts)}


def _in_parts(parts: int, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *factors: Tensor) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = (torch.cat([part.repeat(1, 1, group, 1) for part in x.chunk(parts, 2)], 2) for x in (k, v))
    return layers.attention(q, k, v, visible, *factors)


WHAT_IFS = (
    WhatIf(
        "flat_dim",
        "when parts along an inner dim lie end to end in memory: a collective that works along dim 0",
        both(flat_columns, by_attention(_flat, gradients=True)),
    ),
    WhatIf(
        "transposed",
        "when rows and tokens of the queries are exchanged in memory: right for one row only",
        by_attention(lambda case: {"q": _rows_mixed} if exchanges(case) and case.rows > 1 else {}, gradients=True),
    ),
    WhatIf(
        "kv_order",
        "when copies of key and value heads stand in another order than the queries that read them",
        both(
            by_attention(
                lambda case: (
                    {"": partial(_other_order, case.tp)} if exchanges(case) and 1 < case.kv_heads < case.tp else {}
                ),
                gradients=True,
            ),
            by_attention(_repeated),
        ),
    ),
    WhatIf(
        "kv_alone",
        "when one copy of each key and value head alone gives its gradient: copies are not summed",
        by_attention(
            lambda case: {"": partial(_one_copy, case.tp)} if exchanges(case) and case.kv_heads < case.tp else {},
            gradients=True,
        ),
    ),
)
