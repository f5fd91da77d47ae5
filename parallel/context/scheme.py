"""Context parallelism as a scheme: what the words `cp cp_comm cp_inner cp_slices` replace of a strategy.

    replaced     | by
    local        | this context rank's slice of every row; the mask stays whole
    core         | attention of the slice's queries over the keys of all slices, by the method
    activation   | a cut along the sequence over cp, before the mode's own
    shares       | a cut of the queries, or of heads that are exchanged for them
    data, loss   | the axis dp becomes dp_cp: context ranks see other tokens, so all gradients are partial sums there
    rows         | the calls of the method too, per layer and micro-batch, in attention

The mode's exchange stays around the core. Under isp tokens of the slice are exchanged for heads over tp. Keys and
values of whole slices go round over cp (InternEvo's 2D attention). Loss, gradients and token counts need no factor:
sums over dp_cp, divided once by the number of tokens of all (around.md 14.3).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardproof.parallel.communication.batch import Delivered
from shardproof.parallel.communication.expectation import CallRow
from shardproof.parallel.communication.layout import Cut, Placement
from shardproof.parallel.communication.mesh import Mesh
from shardproof.parallel.context.blocks import Slices, contiguous, slice_row, zigzag
from shardproof.parallel.context.methods import (
    exchanged_attention,
    exchanged_rows,
    gathered_attention,
    gathered_rows,
    nested_attention,
    nested_rows,
    ring_attention,
    ring_rows,
)
from shardproof.parallel.model.strategy import Parts, Strategy
from shardproof.reference.case import Case


def apply(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the slices and the attention of this case's context ranks; itself without any."""
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
    """Placement of attention's shares where the method computes them.

    A rank has queries of its own, or of all ranks with which it exchanged tokens for heads, in the order of the ranks.
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
    """Runs of consecutive places, in their order."""
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
    """(q, k, v, slices=) -> context, by the case's method."""
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
