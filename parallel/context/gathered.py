"""Context parallelism by all-gather: every rank keeps its queries and gets the keys and values of all ranks at once.

Letters: c ranks, K bytes of one rank's keys.

    tensor   | forward                                        | backward                                  | bytes
    k        | [B, s/c, K, D] -> [B, s, K, D]      all_gather | partial -> own         reduce_scatter sum | c*K
    v        | [B, s/c, K, D] -> [B, s, K, D]      all_gather | partial -> own         reduce_scatter sum | c*K

A key's gradient is the sum over the ranks of what their queries add: the conjugate of a gather. What is gathered lies
in the order of the ranks, not of the row, so the mask is taken at the places of both. The gathered keys are kept for
backward: c times the memory of the ring, no call more.
Source: TransformerEngine `AttnFuncWithCPAndKVAllGather` (which gathers again in backward: two all-gathers more);
arXiv:2407.21783 (Llama 3). around.md 14.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from parallel.communication.mesh import Axis
from parallel.communication.pairs import gather_from_sequence
from parallel.context.blocks import of_keys, over_all_keys
from parallel.context.slices import Slices
from parallel.context.transfers import Transfer

__all__ = ["gathered_transfers", "gathered_attention"]


def gathered_attention(
    q_BqND: Tensor, k_BqKD: Tensor, v_BqKD: Tensor, *, axis: Axis, slices: Slices, keep: Tensor | None = None
) -> Tensor:
    """Attention [B,q,N,D] of this rank's queries over the keys of all ranks. Raises ValueError for unequal slices.

    `keep` [B,N,q,S] are the factors of dropout, keys in the order of the row.
    """
    slices.require_equal("gather")
    k, v = (gather_from_sequence(x, axis, dim=1) for x in (k_BqKD, v_BqKD))
    visible = slices.visible(slices.held[axis.rank], slices.whole)
    return over_all_keys(q_BqND, k, v, visible, of_keys(keep, slices.whole))


def gathered_transfers(keys: int, ranks: int) -> Iterator[Transfer]:
    """The calls of one layer and micro-batch on a rank; `keys` are the bytes K."""
    if ranks > 1:
        yield Transfer(phase="forward", op="all_gather", payload_bytes=ranks * keys, calls=2)
        yield Transfer(phase="backward", op="reduce_scatter", reduce_op="sum", payload_bytes=ranks * keys, calls=2)
