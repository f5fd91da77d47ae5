"""How queries meet the keys of all context ranks: by a ring, by all-to-all, by both, or by all-gather.

Ring attention: every rank keeps its queries, while the keys and values of all ranks go round.

There are c ranks. One rank's keys have K = b * (s/c) * kv_heads * head_dim elements, and so have its values. The two
travel together, as one block. Gradients are in the dtype of statistics.

    step of rank r       0        1        2       ..  c-1      then
    computes with        r        r-1      r-2         r+1                all modulo c
    forward hops         k, v  -> k, v  -> ..      -> k, v      -         c-1 sends and receives of 2K
    backward hops        k, v  -> k, v  -> ..      -> k, v      -         c-1 sends and receives of 2K
                                  dk, dv -> dk, dv -> dk, dv -> home      c   sends and receives of 2K, wide

A hop sends to the next rank and receives from the rank before, both in one batch: no rank waits for another one's
receive. The next block travels while this one is computed with. kv heads are repeated for their groups only after a
hop, and keys travel rotated. The gradient of a block follows one step behind it, and every rank adds its part.
After c hops it is back at the block's owner.

Every rank gets every block, also those that none of its queries may see. Slices of unequal length give messages of
unequal length; an empty block is not sent. Source: arXiv:2310.01889; torch `_templated_ring_attention` and picotron
`context_parallel` (backward as here). TransformerEngine `AttnFuncWithCPAndKVP2P` starts backward from the block of the
last step and turns the other way: c-1 hops bring every gradient home. around.md 14.1.

All-to-all, without or inside of a ring: a rank gives tokens away and gets heads for them. The inner axis has `a` ranks,
the outer one c/a. Over the inner axis queries, keys and values go from [B, s/c, N, D] to [B, a*s/c, N/a, D], and the
context goes back. Over the outer axis keys and values go round in a ring. One rank's queries have Q elements, its keys
K' = K, or K * a / kv_heads where kv heads are repeated so that every inner rank gets one.

Without a ring (a = c) a rank then holds whole rows of its heads, in the order of the ranks, and the mask is taken in
this order. With a ring the inner ranks are neighbours, and a rank holds `a` times the tokens with 1/a of the heads. So
a hop carries as many bytes as without the exchange. Source: arXiv:2309.14509 (Ulysses); arXiv:2405.07719 (both, USP);
TransformerEngine `a2a+p2p`. around.md 14.1.

All-gather: every rank keeps its queries and gets the keys and values of all ranks at once, from [B, s/c, K, D] to
[B, s, K, D]. Backward reduce-scatters their gradients, since the queries of every rank add to them. Gathered keys lie
in the order of the ranks, not of the row, and the mask is taken in this order. They are kept for backward: that takes c
times the memory of the ring and no further call. Source: TransformerEngine `AttnFuncWithCPAndKVAllGather` (which
gathers again in backward: two all-gathers more); arXiv:2407.21783 (Llama 3). around.md 14.1.

Context parallelism as a scheme: what the words `cp cp_comm cp_inner cp_slices` replace of a strategy.

    replaced     | by
    local        | this context rank's slice of every row; the mask stays whole
    core         | attention of the slice's queries over the keys of all slices, by the method
    activation   | a cut along the sequence over cp, before the mode's own
    shares       | a cut of the queries, or of the heads for which tokens are exchanged
    data, loss   | the axis dp becomes dp_cp: context ranks see other tokens, so all gradients are partial sums there
    rows         | the calls of the method too, per layer and micro-batch, in attention

The mode's exchange stays around the core. Under isp the tokens of a slice are exchanged for heads over tp, and the keys
and values of whole slices go round over cp (InternEvo's 2D attention). Loss, gradients and token counts need no factor:
they are summed over dp_cp, and divided once by the number of all tokens (around.md 14.3).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.parallel.communication.batch import Delivered
from shardproof.parallel.communication.collectives import Pending
from shardproof.parallel.communication.expectation import MICRO_BATCHES, CallRow
from shardproof.parallel.communication.layout import Axis, Cut, Mesh, Placement
from shardproof.parallel.communication.pairs import gather_from_sequence
from shardproof.parallel.context.blocks import (
    Slices,
    attend,
    contiguous,
    gradients,
    merge_partials,
    of_keys,
    over_all_keys,
    slice_row,
    zigzag,
)
from shardproof.parallel.layers.attention import by_all_to_all
from shardproof.parallel.layers.roles import ATTENTION
from shardproof.parallel.model.strategy import Parts, Strategy
from shardproof.reference.case import Case


def ring_attention(
    q_BqND: Tensor,
    k_BqKD: Tensor,
    v_BqKD: Tensor,
    *,
    axis: Axis,
    slices: Slices,
    keep: Tensor | None = None,
    overlap: bool = True,
) -> Tensor:
    """Attention [B,q,N,D] of this rank's queries over the keys of all ranks.

    `keep` [B,N,q,S] are the factors of dropout, keys in the order of the row.
    """
    context: Tensor = _Ring.apply(q_BqND, k_BqKD, v_BqKD, axis, slices, keep, overlap)
    return context


class _Ring(torch.autograd.Function):
    """Forward and backward as in the table of this module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, slices: Slices, keep: Tensor | None, overlap: bool
    ) -> Tensor:
        ctx.axis, ctx.slices, ctx.overlap = axis, slices, overlap
        block, whole, own = torch.stack((k, v)), None, slices.held[axis.rank]
        for step in range(axis.size):
            keys = slices.held[_owner(axis, step)]
            ahead = _hop(block, axis, slices, step, overlap=overlap) if step < axis.size - 1 else None
            part = attend(q, block[0], block[1], slices.visible(own, keys), of_keys(keep, keys))
            whole = part if whole is None else merge_partials(whole, part)
            block = block if ahead is None else ahead.wait()
        assert whole is not None  # an axis has at least this rank
        ctx.save_for_backward(q, k, v, keep, *whole)
        return whole[0].flatten(2, 3).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keep, *whole = ctx.saved_tensors
        axis, slices, own = ctx.axis, ctx.slices, ctx.slices.held[ctx.axis.rank]
        block, grad_q, home = torch.stack((k, v)), torch.zeros_like(whole[0]).flatten(2, 3), None
        for step in range(axis.size):
            keys = slices.held[_owner(axis, step)]
            ahead = _hop(block, axis, slices, step, overlap=ctx.overlap) if step < axis.size - 1 else None
            visible, factors = slices.visible(own, keys), of_keys(keep, keys)
            own_q, *own_kv = gradients(grad, q, block[0], block[1], visible, (whole[0], whole[1]), factors)
            grad_q += own_q
            grad_kv = torch.stack(own_kv) if home is None else home.wait() + torch.stack(own_kv)
            home = _hop(grad_kv, axis, slices, step, overlap=ctx.overlap)
            block = block if ahead is None else ahead.wait()
        assert home is not None  # an axis has at least this rank
        grad_k, grad_v = home.wait().unbind()
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None, None


def _owner(axis: Axis, step: int) -> int:
    """The rank whose block this rank computes with in a step."""
    return (axis.rank - step) % axis.size


def _hop(block: Tensor, axis: Axis, slices: Slices, step: int, *, overlap: bool) -> Pending:
    """Begin to send this step's block [2,B,tokens,K,D] to the next rank and to receive the next step's."""
    if axis.size == 1:
        return Pending(None, lambda: block)
    sender, receiver = axis.ranks[axis.rank - 1], axis.ranks[(axis.rank + 1) % axis.size]
    arriving = block.new_empty((*block.shape[:2], len(slices.held[_owner(axis, step + 1)]), *block.shape[3:]))
    messages = [
        dist.P2POp(move, tensor, peer, axis.group)
        for move, tensor, peer in ((dist.isend, block, receiver), (dist.irecv, arriving, sender))
        if tensor.numel()
    ]
    works = dist.batch_isend_irecv(messages) if messages else []

    def wait_for_block() -> Tensor:
        for work in works:
            work.wait()
        return arriving

    if not overlap:
        wait_for_block()
        works = []
    return Pending(None, wait_for_block)


def ring_rows(keys: str, *, axis: str) -> tuple[CallRow, ...]:
    """The messages of a ring with equal slices; `keys` is the formula of K, the elements of one rank's keys."""

    block: Callable[..., CallRow] = partial(CallRow, ATTENTION, elements=f"2 * {keys}", axis=axis, again="core")
    follow = partial(block, times=f"(ranks - 1) * {MICRO_BATCHES}", hidden="overlap")
    home = "gradients come home, when nothing is left to compute"
    return tuple(
        row
        for op in ("send", "recv")
        for row in (
            follow("forward backward", op, why="keys and values go on to the next rank"),
            follow("backward", op, why="gradients follow their keys and values", dtype="loss"),
            block("backward", op, why=home, dtype="loss"),
        )
    )


def gathered_attention(
    q_BqND: Tensor, k_BqKD: Tensor, v_BqKD: Tensor, *, axis: Axis, slices: Slices, keep: Tensor | None = None
) -> Tensor:
    """Attention [B,q,N,D] of this rank's queries over the keys of all ranks. Raises ValueError for unequal slices.

    `keep` [B,N,q,S] are the factors of dropout, keys in the order of the row.
    """
    slices.require_equal("gather")
    k, v = (gather_from_sequence(x, axis, dim=1) for x in (k_BqKD, v_BqKD))
    visible = slices.visible(slices.held[axis.rank], slices.gather_order)
    return over_all_keys(q_BqND, k, v, visible, of_keys(keep, slices.gather_order))


def gathered_rows(keys: str, *, axis: str) -> tuple[CallRow, ...]:
    """The calls of attention by all-gather; `keys` is the formula of K, the elements of one rank's keys."""
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

    `keep` are the factors of dropout for the heads and queries after the exchange, keys in the order of the row.
    """
    slices.require_equal("alltoall")
    visible = slices.visible(slices.gather_order, slices.gather_order)
    factors = of_keys(keep, slices.gather_order)
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
    """The exchange of `exchanged_attention` over the inner ranks, with ring attention over the outer ones as its core.

    Context rank r is inner rank r % a and outer rank r // a. Raises ValueError for unequal slices.
    """
    slices.require_equal("alltoall inside of a ring")
    groups = slices.merge_ranks(inner.size)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, axis=outer, slices=groups, keep=keep, overlap=overlap)

    return by_all_to_all(inner)(core, q_BqND, k_BqKD, v_BqKD)


def exchanged_rows(queries: str, keys: str, *, axis: str) -> tuple[CallRow, ...]:
    """The exchanges over an axis, by the formulas of Q and K' (see above)."""
    each = partial(CallRow, ATTENTION, "forward backward", "all_to_all", axis=axis, again="core")
    return (
        each(queries, "tokens of queries for heads"),
        each(f"2 * {keys}", "tokens of keys and values for heads"),
        each(queries, "heads of the context for tokens"),
    )


def nested_rows(queries: str, keys: str) -> tuple[CallRow, ...]:
    """The calls of both levels, by the formulas of Q and K'."""
    return (*exchanged_rows(queries, keys, axis="cp_inner"), *ring_rows(keys, axis="cp_outer"))


def apply(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the slices and the attention of this case's context ranks; unchanged if there is one rank."""
    if not case.is_sliced:
        return strategy

    def parts(case: Case, mesh: Mesh, device: torch.device) -> Parts:
        return _parts(case, mesh, strategy.parts(case, mesh, device))

    def activation(case: Case, module: str) -> Placement | None:
        place = strategy.activation(case, module)
        return None if place is None else replace(place, cuts=(_token_cut(case, dim=1), *place.cuts))

    data_axes, loss_axes = (
        tuple("dp_cp" if axis == "dp" else axis for axis in axes) for axes in (strategy.data_axes, strategy.loss_axes)
    )
    return replace(
        strategy,
        data_axes=data_axes,
        loss_axes=loss_axes,
        parts=parts,
        rows=(*strategy.rows, *_rows(case)),
        activation=activation,
        shares=lambda case: _shares(case, strategy.shares(case)),
    )


def _places_of_ranks(case: Case) -> tuple[Tensor, ...]:
    """The places of a row that each context rank holds."""
    order = zigzag if case.cp_slices == "zigzag" else contiguous
    return order(case.row_tokens, case.cp)


def _shares(case: Case, place: Placement) -> Placement:
    """The placement of the attention probabilities as the case's method computes them.

    A rank has its own queries; or, in the order of ranks, the queries of all ranks with which it exchanged heads.
    """
    exchanged = {"alltoall": "cp", "alltoall-ring": "cp_inner"}.get(case.cp_comm)
    if exchanged is None:
        return replace(place, cuts=(*place.cuts, _token_cut(case, dim=2)))
    inner = case.cp if exchanged == "cp" else case.cp_inner
    slices = Slices(held=_places_of_ranks(case)).merge_ranks(inner).held
    queries = Cut(axis="cp_outer", dim=2, held=tuple(_ranges(own) for own in slices))
    if exchanged == "cp":
        queries = replace(queries, axis="cp", held=queries.held * case.cp)  # all of them, on every rank
    return replace(place, cuts=(*place.cuts, Cut(axis=exchanged, dim=1), queries))


def _ranges(places: Tensor) -> tuple[range, ...]:
    """The places as ranges of consecutive ones, in the same order."""
    borders = [0, *(1 + (places.diff() != 1).nonzero()[:, 0]).tolist(), len(places)]
    firsts = [int(places[border]) for border in borders[:-1]]
    return tuple(
        range(first, first + last - start) for first, start, last in zip(firsts, borders, borders[1:], strict=False)
    )


def _token_cut(case: Case, *, dim: int) -> Cut:
    """The cut of a row's tokens over the context ranks."""
    return Cut(axis="cp", dim=dim, order="zigzag" if case.cp_slices == "zigzag" else "blocks")


def _parts(case: Case, mesh: Mesh, parts: Parts) -> Parts:
    held = _places_of_ranks(case)
    own = held[mesh.axis("cp").rank]
    method = _method(case, mesh)

    def local(batch: Delivered) -> Delivered:
        tokens, labels, loss_mask, positions = (
            slice_row(x, own) if x.numel() else x  # what a pipeline stage does not read is empty
            for x in (batch.tokens, batch.labels, batch.loss_mask, batch.positions)
        )
        mine = replace(batch, tokens=tokens, labels=labels, loss_mask=loss_mask, positions=positions)
        return parts.local(mine)

    def core(q: Tensor, k: Tensor, v: Tensor, hidden_B1SS: Tensor | None, keep: Tensor | None) -> Tensor:
        hidden = None if hidden_B1SS is None else hidden_B1SS[:, 0]
        return method(q, k, v, slices=Slices(held=held, hidden=hidden), keep=keep)

    return replace(parts, local=local, core=core)


def _method(case: Case, mesh: Mesh) -> Callable[..., Tensor]:
    """The case's method: (q, k, v, slices=, keep=) -> context."""
    match case.cp_comm:
        case "gather":
            return partial(gathered_attention, axis=mesh.axis("cp"))
        case "alltoall":
            return partial(exchanged_attention, axis=mesh.axis("cp"))
        case "alltoall-ring":
            inner, outer = mesh.axis("cp_inner"), mesh.axis("cp_outer")
            return partial(nested_attention, inner=inner, outer=outer, overlap=case.overlap)
    return partial(ring_attention, axis=mesh.axis("cp"), overlap=case.overlap)


def _rows(case: Case) -> tuple[CallRow, ...]:
    """The calls of the method."""
    token = "slice_tokens * head_dim"
    queries, kv_heads = f"{token} * heads // tp", "max(kv_heads, tp) // tp"
    match case.cp_comm:
        case "gather":
            return gathered_rows(f"{token} * {kv_heads}", axis="cp")
        case "alltoall":
            return exchanged_rows(queries, f"{token} * max(kv_heads // tp, cp)", axis="cp")
        case "alltoall-ring":
            return nested_rows(queries, f"{token} * max(kv_heads // tp, cp_inner)")
    return ring_rows(f"{token} * {kv_heads}", axis="cp")
