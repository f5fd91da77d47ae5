"""Tokens to their experts and back, among the etp*ep ranks that together hold all experts of a layer.

dispatcher=alltoall: every rank tells all others how many rows it sends to each expert. Rows and weights go, sorted by
expert, to the ranks of their experts over ep. Where etp ranks split an expert, they gather each other's rows, padded to
the largest number that one of them has, and add up their partial outputs. The outputs return the way the rows came.

dispatcher=allgather: choices, weights and tokens of all ranks are gathered. Each rank adds up the outputs of its
experts for every token, and a reduce-scatter adds these sums up over all ranks and leaves each rank its own tokens.

Outputs travel in the dtype of hidden states. T tokens, R rows, E experts, H hidden. Source: Megatron-Core 0.16.1
`MoEAlltoAllTokenDispatcher`, `MoEAllGatherTokenDispatcher` (experts.md 22). There gathers over etp are lists of unequal
parts, and sums travel in the dtype of weights.

With a capacity an expert takes at most `most_rows` rows of the tokens that compete for it; the others are dropped.

    capacity_of=rank          the tokens of a rank in a micro-batch compete
    capacity_of=micro-batch   the tokens of all ranks that hold the micro-batch compete; they gather weights or choices
    drop=score                the tokens with the largest weights stay; of equal ones the first
    drop=position             the first tokens stay, by their numbers
    pad                       every rank sends `most_rows` rows to every expert, filled up with zeros

Weights are not normalised again; a token that lost all its experts gets 0 from them. Which rows of a rank are dropped
depends on the tokens that it holds (experts.md 21.3, X15). Source: Megatron-Core 0.16.1 `apply_router_token_dropping`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shardproof.parallel.communication.collectives import all_gather
from shardproof.parallel.communication.layout import Axis, Mesh, coordinates
from shardproof.parallel.communication.pairs import exchange_rows, gather_from_sequence, reduce_scatter_to_sequence
from shardproof.parallel.experts.counts import RowCounts
from shardproof.reference.case import Case
from shardproof.reference.data.routing import EQUAL_DIGITS


def apply_capacity(case: Case, weights_TE: Tensor, chosen_TE: Tensor, order_T: Tensor) -> Tensor:
    """The choices of competing tokens that are not dropped, bool [T, E]; `order_T` are the numbers of the tokens."""
    first = order_T.argsort(stable=True).to(chosen_TE.device)
    chosen = chosen_TE[first]
    value = weights_TE.detach()[first] if case.drop == "score" else -torch.arange(len(first)).double()[:, None]
    value = value.round(decimals=EQUAL_DIGITS)
    value = torch.where(chosen, value.to(weights_TE.device), -torch.inf)
    best = value.argsort(dim=0, descending=True, stable=True)[: case.most_rows]
    kept = torch.zeros_like(chosen).scatter_(0, best, True) & chosen
    return torch.zeros_like(kept).index_copy(0, first, kept)


def taken_of_all(case: Case, weights_TE: Tensor, chosen_TE: Tensor, numbers_RT: Tensor, axis: Axis) -> Tensor:
    """The choices of this rank's tokens that are not dropped, bool [T, E], when the tokens of all ranks of the axis
    compete. `numbers_RT` are the numbers of every rank's tokens.
    """
    if case.drop == "score":  # a weight is positive where an expert is chosen
        weights_TE = all_gather((weights_TE * chosen_TE).detach(), axis, dim=0)
        chosen_TE = weights_TE > 0
    else:
        chosen_TE = all_gather(chosen_TE, axis, dim=0)
        weights_TE = chosen_TE.to(weights_TE.dtype)
    return apply_capacity(case, weights_TE, chosen_TE, numbers_RT.flatten()).chunk(axis.size)[axis.rank]


def pad_to_most(case: Case, experts_R: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, filled up with zeros to `most_rows` for each expert, and the places of the real rows."""
    count = torch.bincount(experts_R, minlength=case.experts)
    within_R = torch.arange(len(experts_R), device=rows.device) - (count.cumsum(0) - count)[experts_R]
    places_R = experts_R * case.most_rows + within_R
    empty = rows.new_zeros((case.experts * case.most_rows, *rows.shape[1:]))
    return empty.index_copy(0, places_R, rows), places_R


Compute = Callable[[Tensor, Tensor, Sequence[int]], Tensor]
"""(rows [R, H] sorted by expert, their weights [R], the number of rows of each expert) -> their outputs [R, H]."""
Known = Callable[[int], Sequence[int]]
"""Global rank -> how many rows it sends to each expert, where meta tensors cannot say so."""


class _Among:
    """The ranks that hold all experts together, as seen from one of them."""

    def __init__(self, case: Case, mesh: Mesh) -> None:
        self.case, self.every = case, mesh.axis("etp_ep")
        self.etp, self.ep = mesh.axis("etp"), mesh.axis("ep")
        self.at = [coordinates(case, rank) for rank in self.every.ranks]

    def count_rows(self, rows_WE: Sequence[Sequence[int]]) -> RowCounts:
        """The counts of rows that the ranks send each other; `rows_WE` has those of every rank, by rank."""
        table = {(at["etp"][0], at["ep"][0]): tuple(rows) for at, rows in zip(self.at, rows_WE, strict=True)}
        rows = tuple(tuple(table[etp, ep] for ep in range(self.ep.size)) for etp in range(self.etp.size))
        return RowCounts(rows=rows, etp=self.etp.rank, ep=self.ep.rank)


class ByAllToAll(_Among):
    """Exchange the rows for experts."""

    def __call__(self, x_TH: Tensor, weights_TE: Tensor, chosen_TE: Tensor, compute: Compute, known: Known) -> Tensor:
        """Sum of the outputs of every token's experts: [T, H]."""
        sent = self._count_sent(chosen_TE, known)
        experts_R, tokens_R = _pairs(chosen_TE, sum(sent.rows_to_send))
        x_RH, weights_R = x_TH[tokens_R], weights_TE[tokens_R, experts_R]
        if self.case.pad:
            (x_RH, places_R), (weights_R, _) = (pad_to_most(self.case, experts_R, rows) for rows in (x_RH, weights_R))
        x_RH, weights_R = (
            exchange_rows(rows, self.ep, sent.rows_to_send, sent.rows_to_receive) for rows in (x_RH, weights_R)
        )
        x_RH, weights_R = (self._gather_rows(rows, sent.most) for rows in (x_RH, weights_R))
        order = torch.tensor(sent.sorted_by_expert(), dtype=torch.int64, device=x_TH.device)
        y_RH = compute(x_RH[order], weights_R[order], sent.by_expert)
        y_RH = torch.zeros_like(x_RH).index_copy(0, order, y_RH)
        y_RH = reduce_scatter_to_sequence(y_RH, self.etp, dim=0)[: sum(sent.rows_to_receive)]
        y_RH = exchange_rows(y_RH, self.ep, sent.rows_to_receive, sent.rows_to_send)
        if self.case.pad:
            y_RH = y_RH[places_R]
        return torch.zeros_like(x_TH).index_add(0, tokens_R, y_RH)

    def _count_sent(self, chosen_TE: Tensor, known: Known) -> RowCounts:
        """How many rows every rank sends: known in advance with `pad`, else gathered by a collective."""
        if self.case.pad:
            return self.count_rows([[self.case.most_rows] * self.case.experts] * self.every.size)
        rows_WE = all_gather(chosen_TE.sum(0)[None], self.every, dim=0)
        if rows_WE.is_meta:
            return self.count_rows([known(rank) for rank in self.every.ranks])
        return self.count_rows(rows_WE.tolist())

    def _gather_rows(self, rows: Tensor, most: int) -> Tensor:
        """The rows of all etp ranks, those of each padded to `most` rows."""
        missing = most - rows.shape[0] if self.etp.size > 1 else 0
        padded = functional.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, missing))
        return gather_from_sequence(padded, self.etp, dim=0)


class ByAllGather(_Among):
    """All tokens are gathered."""

    def __call__(self, x_TH: Tensor, weights_TE: Tensor, chosen_TE: Tensor, compute: Compute, known: Known) -> Tensor:
        """Sum of the outputs of every token's experts: [T, H]."""
        chosen_TE = all_gather(chosen_TE, self.every, dim=0)
        weights_TE = gather_from_sequence(weights_TE, self.every, dim=0)
        x_TH = gather_from_sequence(x_TH, self.every, dim=0)
        share = self.case.experts // self.ep.size
        local = slice(self.ep.rank * share, (self.ep.rank + 1) * share)
        if chosen_TE.is_meta:
            rows = self.count_rows([known(rank) for rank in self.every.ranks]).by_expert
        else:
            rows = chosen_TE[:, local].sum(0).tolist()
        experts_R, tokens_R = _pairs(chosen_TE[:, local], sum(rows))
        y_RH = compute(x_TH[tokens_R], weights_TE[:, local][tokens_R, experts_R], rows)
        return reduce_scatter_to_sequence(torch.zeros_like(x_TH).index_add(0, tokens_R, y_RH), self.every, dim=0)


def _pairs(chosen_TE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Expert and token of every row, sorted by expert and then by token; `rows` is their number."""
    if chosen_TE.is_meta:
        return (torch.empty(rows, dtype=torch.int64, device="meta"),) * 2
    experts_R, tokens_R = chosen_TE.T.nonzero(as_tuple=True)
    return experts_R, tokens_R
