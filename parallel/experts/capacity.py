"""What an expert takes of one rank's tokens: `most_rows` of a micro-batch, the rest is dropped, or rows are filled up.

    drop=score      those with the largest weights stay, of equal ones the first tokens
    drop=position   the first tokens stay, by their numbers
    pad             every rank sends exactly as many rows to every expert: zeros, of weight 0, fill up

Weights are not normalised again; a token that lost all its experts gets 0 from them. Dropping depends on which tokens
a rank holds (experts.md 21.3, X15): the case states it. Source: Megatron-Core 0.16.1 `apply_router_token_dropping`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.case import Case
from reference.data.routing import EQUAL_DIGITS

__all__ = ["filled", "taken"]


def taken(case: Case, weights_TE: Tensor, chosen_TE: Tensor, order_T: Tensor) -> Tensor:
    """The choices that experts take, bool [T, E]; `order_T` are the numbers of the tokens."""
    first = order_T.argsort(stable=True)
    chosen = chosen_TE[first]
    value = weights_TE.detach()[first] if case.drop == "score" else -torch.arange(len(first)).double()[:, None]
    value = value.round(decimals=EQUAL_DIGITS)
    value = torch.where(chosen, value.to(weights_TE.device), -torch.inf)
    best = value.argsort(dim=0, descending=True, stable=True)[: case.most_rows]
    kept = torch.zeros_like(chosen).scatter_(0, best, True) & chosen
    return torch.zeros_like(kept).index_copy(0, first, kept)


def filled(case: Case, experts_R: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, filled up with zeros to as many of each, and the places of the real ones."""
    count = torch.bincount(experts_R, minlength=case.experts)
    within_R = torch.arange(len(experts_R), device=rows.device) - (count.cumsum(0) - count)[experts_R]
    places_R = experts_R * case.most_rows + within_R
    empty = rows.new_zeros((case.experts * case.most_rows, *rows.shape[1:]))
    return empty.index_copy(0, places_R, rows), places_R
