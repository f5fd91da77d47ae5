"""Capacity of an expert for the tokens that compete for it: `most_rows`, the rest is dropped, or rows are filled up.

    capacity_of=rank          those of a rank in a micro-batch: no rank needs to know of others
    capacity_of=micro-batch   those of all ranks that hold the micro-batch, which gather what decides
    drop=score                those with the largest weights stay, of equal ones the first tokens
    drop=position             the first tokens stay, by their numbers
    pad                       every rank sends exactly as many rows to every expert: zeros, of weight 0, fill up

Weights are not normalised again; a token that lost all its experts gets 0 from them. Which rows of a rank are dropped
depends on the tokens that it holds (experts.md 21.3, X15): the case states it. Source: Megatron-Core 0.16.1
`apply_router_token_dropping`.
"""

import torch
from torch import Tensor

from parallel.communication.collectives import all_gather
from parallel.communication.mesh import Axis
from reference.case import Case
from reference.data.routing import EQUAL_DIGITS


def taken(case: Case, weights_TE: Tensor, chosen_TE: Tensor, order_T: Tensor) -> Tensor:
    """The choices of competing tokens that experts take, bool [T, E]; `order_T` are the numbers of the tokens."""
    first = order_T.argsort(stable=True).to(chosen_TE.device)
    chosen = chosen_TE[first]
    value = weights_TE.detach()[first] if case.drop == "score" else -torch.arange(len(first)).double()[:, None]
    value = value.round(decimals=EQUAL_DIGITS)
    value = torch.where(chosen, value.to(weights_TE.device), -torch.inf)
    best = value.argsort(dim=0, descending=True, stable=True)[: case.most_rows]
    kept = torch.zeros_like(chosen).scatter_(0, best, True) & chosen
    return torch.zeros_like(kept).index_copy(0, first, kept)


def taken_of_all(case: Case, weights_TE: Tensor, chosen_TE: Tensor, numbers_RT: Tensor, axis: Axis) -> Tensor:
    """Taken pairs where tokens of all ranks of the axis compete; `numbers_RT` are those of every rank's tokens."""
    if case.drop == "score":  # a weight is positive where an expert is chosen
        weights_TE = all_gather((weights_TE * chosen_TE).detach(), axis, dim=0)
        chosen_TE = weights_TE > 0
    else:
        chosen_TE = all_gather(chosen_TE, axis, dim=0)
        weights_TE = chosen_TE.to(weights_TE.dtype)
    return taken(case, weights_TE, chosen_TE, numbers_RT.flatten()).chunk(axis.size)[axis.rank]


def filled(case: Case, experts_R: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, filled up with zeros to as many of each, and the places of the real ones."""
    count = torch.bincount(experts_R, minlength=case.experts)
    within_R = torch.arange(len(experts_R), device=rows.device) - (count.cumsum(0) - count)[experts_R]
    places_R = experts_R * case.most_rows + within_R
    empty = rows.new_zeros((case.experts * case.most_rows, *rows.shape[1:]))
    return empty.index_copy(0, places_R, rows), places_R
