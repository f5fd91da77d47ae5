"""Context parallelism by all-to-all, alone or inside of a ring: a rank gives tokens away and gets heads for them.

Letters: a ranks of the inner axis, c/a of the outer one; Q elements of one rank's queries, K of its keys. K' = K, or K
* a / kv_heads where each kv head must be repeated for every inner rank to get one.

Over the inner axis queries, keys and values go from [B, s/c, N, D] to [B, a*s/c, N/a, D], and the context back. Over
the outer axis keys and values go round in a ring (`parallel.context.ring`).

With the inner axis alone (a = c) the exchanged rank holds whole rows of its heads, in the order of the ranks. The mask
is taken at their places. With both, the inner ranks are neighbours, and the exchanged rank holds the tokens of all of
them. These are `a` times the tokens, `a` times thinner, so a hop of the ring carries as many bytes as without the
exchange. Source: arXiv:2309.14509 (Ulysses); arXiv:2405.07719 (both, USP); TransformerEngine `a2a+p2p`. around.md 14.1.

Context parallelism by all-gather: every rank keeps its queries and gets the keys and values of all ranks at once. Keys
and values go from [B, s/c, K, D] to [B, s, K, D] on c ranks. Their gradients go back from partial sums to own parts. A
key's gradient is the sum over the ranks of what their queries add: the conjugate of a gather. Gathered keys lie in the
order of the ranks, not of the row, so the mask is taken at the places of both. They are kept for backward: c times the
memory of the ring, no call more. Source: TransformerEngine `AttnFuncWithCPAndKVAllGather` (which gathers again in
backward: two all-gathers more); arXiv:2407.21783 (Llama 3). around.md 14.1.
"""

from functools import partial

from torch import Tensor

from shardproof.parallel.communication.expectation import MICRO_BATCHES, CallRow
from shardproof.parallel.communication.mesh import Axis
from shardproof.parallel.communication.pairs import gather_from_sequence
from shardproof.parallel.context.blocks import of_keys, over_all_keys
from shardproof.parallel.context.ring import ring_attention, ring_rows
from shardproof.parallel.context.slices import Slices
from shardproof.parallel.layers.attention import by_all_to_all
from shardproof.parallel.layers.roles import ATTENTION


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


def gathered_rows(keys: str, *, axis: str) -> tuple[CallRow, ...]:
    """The calls; `keys` is the formula of the elements K."""
    times = f"2 * {MICRO_BATCHES}"
    each = partial(CallRow, ATTENTION, elements=f"{axis} * {keys}", axis=axis, times=times, again="core")
    return (
        each("forward", "all_gather", why="keys, values of all ranks"),
        each("backward", "reduce_scatter", why="their gradients"),
    )


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
    """Exchange as in `exchanged_attention`, with a ring of the outer ranks around.

    Rank r of the slices is inner rank r % a of outer rank r // a. Raises ValueError for unequal slices.
    """
    slices.require_equal("alltoall inside of a ring")
    groups = slices.joined(inner.size)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, axis=outer, slices=groups, keep=keep, overlap=overlap)

    return by_all_to_all(inner)(core, q_BqND, k_BqKD, v_BqKD)


def exchanged_rows(queries: str, keys: str, *, axis: str) -> tuple[CallRow, ...]:
    """The exchanges over an axis; formulas of the elements Q and K' (repeated heads counted)."""
    each = partial(CallRow, ATTENTION, "forward backward", "all_to_all", axis=axis, again="core")
    return (
        each(queries, "tokens of queries for heads"),
        each(f"2 * {keys}", "tokens of keys and values for heads"),
        each(queries, "heads of the context for tokens"),
    )


def nested_rows(queries: str, keys: str) -> tuple[CallRow, ...]:
    """The calls of both levels, by the formulas of Q and K'."""
    return (*exchanged_rows(queries, keys, axis="cp_inner"), *ring_rows(keys, axis="cp_outer"))
