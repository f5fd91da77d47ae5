"""Context parallelism by all-to-all, alone or inside of a ring: a rank gives tokens away and gets heads for them.

Letters: a ranks of the inner axis, c/a of the outer one; Q bytes of one rank's queries, K of its keys; K' = K, or
K * a / kv_heads where each kv head must be repeated for every inner rank to get one.

    tensor   | axis  | forward                                               | backward         | bytes
    q        | inner | [B, s/c, N, D] -> [B, a*s/c, N/a, D]        all_to_all| all_to_all       | Q
    k and v  | inner | [B, s/c, 2, K, D] -> [B, a*s/c, 2, K/a, D]  all_to_all| all_to_all       | 2K'
    context  | inner | [B, a*s/c, N/a, D] -> [B, s/c, N, D]        all_to_all| all_to_all       | Q
    k and v  | outer | c/a - 1 hops of a ring                                | 2*(c/a) - 1 hops | 2K'

With the inner axis alone (a = c) the exchanged rank holds whole rows of its heads, in the order of the ranks: the mask
is taken at their places. With both, the inner ranks are neighbours, and the exchanged rank holds the tokens of all of
them: `a` times the tokens, `a` times thinner, so a hop of the ring carries as many bytes as without the exchange.
Source: arXiv:2309.14509 (Ulysses); arXiv:2405.07719 (both, USP); TransformerEngine `a2a+p2p`. around.md 14.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from parallel.communication.mesh import Axis
from parallel.context.blocks import of_keys, over_all_keys
from parallel.context.ring import ring_attention, ring_transfers
from parallel.context.slices import Slices
from parallel.context.transfers import Transfer
from parallel.layers.ulysses import by_all_to_all

__all__ = ["exchanged_attention", "exchanged_transfers", "nested_attention", "nested_transfers"]


def exchanged_attention(
    q_BqND: Tensor, k_BqKD: Tensor, v_BqKD: Tensor, *, axis: Axis, slices: Slices, keep: Tensor | None = None
) -> Tensor:
    """Attention [B,q,N,D] of this rank's queries over the keys of all ranks. Raises ValueError for unequal slices.

    `keep` are the factors of dropout of the exchanged heads and queries, keys in the order of the row.
    """
    slices.require_equal("alltoall")
    visible = slices.visible(slices.whole, slices.whole)
    factors = of_keys(keep, slices.whole)
    return by_all_to_all(axis)(lambda q, k, v: over_all_keys(q, k, v, visible, factors), q_BqND, k_BqKD, v_BqKD)


def nested_attention(
    q_BqND: Tensor,
    k_BqKD: Tensor,
    v_BqKD: Tensor,
    *,
    inner: Axis,
    outer: Axis,
    slices: Slices,
    keep: Tensor | None = None,
    overlap: bool = True,
) -> Tensor:
    """The same with a ring of the outer ranks around; rank r of the slices is inner rank r % a of outer rank r // a.

    Raises ValueError for unequal slices.
    """
    slices.require_equal("alltoall inside of a ring")
    groups = slices.joined(inner.size)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, axis=outer, slices=groups, keep=keep, overlap=overlap)

    return by_all_to_all(inner)(core, q_BqND, k_BqKD, v_BqKD)


def exchanged_transfers(queries: int, keys: int, ranks: int) -> Iterator[Transfer]:
    """The calls of one layer and micro-batch on a rank, of bytes Q and K' (repeated heads counted)."""
    for phase in ("forward", "backward") if ranks > 1 else ():
        yield Transfer(phase=phase, op="all_to_all", payload_bytes=queries, calls=2)
        yield Transfer(phase=phase, op="all_to_all", payload_bytes=2 * keys)


def nested_transfers(queries: int, keys: int, *, inner: int, outer: int, wide: int = 1) -> Iterator[Transfer]:
    """The calls of one layer and micro-batch on a rank with both levels, of bytes Q and K'."""
    for transfer in exchanged_transfers(queries, keys, inner):
        yield replace(transfer, axis="inner")
    for transfer in ring_transfers([keys] * outer, 0, wide=wide):
        yield replace(transfer, axis="outer")
