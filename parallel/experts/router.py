"""The router of one layer: logits of this rank's own tokens, which experts they go to, and with what weight.

    softmax       select the largest logits; weights are the softmax of those selected
    pre-softmax   the same selection; weights are their shares of the softmax over all experts, not normalised again
    sigmoid       weights are the sigmoids of those selected, divided by their sum where there are several

Of equal logits the one with the smaller number is selected: `torch.topk` promises nothing. All times `router_scale`.
Letters: T tokens, E experts. Source: Megatron-Core 0.16.1 `topk_routing_with_score_function` (experts.md 21.1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from reference.case import Case
from reference.model.parameters import dtype_of

__all__ = ["Router", "router_dtype", "select", "weigh"]


def router_dtype(case: Case) -> torch.dtype:
    """The dtype of logits, and of the weights that travel with rows."""
    dtype: torch.dtype = dtype_of(case) if case.router_dtype == "model" else getattr(torch, case.router_dtype)
    return dtype


class Router(nn.Module):
    """A linear without bias, whole on every rank, in a dtype of its own."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        self.dtype = router_dtype(case)
        shape = (case.experts, case.hidden)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype_of(case), device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [.., .., hidden] -> logits [.., .., E]."""
        return functional.linear(x.to(self.dtype), self.weight.to(self.dtype))


def select(case: Case, logits_TE: Tensor) -> Tensor:
    """The experts of every token, bool [T, E]."""
    ranked = torch.argsort(logits_TE.detach(), dim=-1, descending=True, stable=True)
    return torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(-1, ranked[:, : case.top_k], True)


def weigh(case: Case, logits_TE: Tensor, chosen_TE: Tensor) -> Tensor:
    """The weight of every expert for every token, [T, E], 0 where it is not chosen."""
    if case.router == "softmax":
        shares = torch.where(chosen_TE, logits_TE, -torch.inf).softmax(-1)
    elif case.router == "pre-softmax":
        shares = logits_TE.softmax(-1).where(chosen_TE, 0)
    else:
        shares = logits_TE.sigmoid().where(chosen_TE, 0)
        if case.top_k > 1:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    weights: Tensor = shares * case.router_scale
    return weights
