"""Context parallelism by all-gather: every rank keeps its queries and gets the keys and values of all ranks at once.

Keys and values go from [B, s/c, K, D] to [B, s, K, D] on c ranks. Their gradients go back from partial sums to own
parts. A key's gradient is the sum over the ranks of what their queries add: the conjugate of a gather. Gathered keys
lie in the order of the ranks, not of the row, so the mask is taken at the places of both. They are kept for backward: c
times the memory of the ring, no call more. Source: TransformerEngine `AttnFuncWithCPAndKVAllGather` (which gathers
again in backward: two all-gathers more); arXiv:2407.21783 (Llama 3). around.md 14.1.
"""

from functools import partial

from torch import Tensor

from parallel.communication.expectation import MICRO_BATCHES, CallRow
from parallel.communication.mesh import Axis
from parallel.communication.pairs import gather_from_sequence
from parallel.context.blocks import of_keys, over_all_keys
from parallel.context.slices import Slices
from parallel.layers.roles import ATTENTION


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
