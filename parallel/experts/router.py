"""The router of one layer: logits of this rank's own tokens, which experts they go to, and with what weight.

    softmax       select the largest logits; weights are the softmax of those selected
    pre-softmax   the same selection; weights are their shares of the softmax over all experts, not normalised again
    sigmoid       weights are the sigmoids of those selected, divided by their sum where there are several

Of equal scores the one with the smaller number is selected: `torch.topk` promises nothing. All times `router_scale`.
With `router_groups` only the experts of `kept_groups` may be selected, of those with the largest sums of their best
scores, top_k / kept_groups of each. With `bias_rate` a bias is added to sigmoids where they are selected alone.
Letters: T tokens, E experts. Source: Megatron-Core 0.16.1 `topk_routing_with_score_function` (experts.md 21.1).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from reference.case import Case
from reference.model.parameters import dtype_of


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
        self.bias = torch.zeros(case.experts, dtype=torch.float64, device=device)
        self.is_sigmoid = case.router == "sigmoid"

    def selecting(self, logits: Tensor) -> Tensor:
        """The scores by which experts are selected."""
        return logits.sigmoid() + self.bias if self.is_sigmoid else logits

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [.., .., hidden] -> logits [.., .., E]."""
        return functional.linear(x.to(self.dtype), self.weight.to(self.dtype))


def scores(case: Case, logits: Tensor) -> Tensor:
    """The share of every expert in each token, all experts considered: [.., E]."""
    if case.router != "sigmoid":
        return logits.softmax(-1)
    one = logits.sigmoid()
    return one / (one.sum(-1, keepdim=True) + 1e-20)


def select(case: Case, score: Tensor, *, plain: bool = False) -> Tensor:
    """The experts of every token by these scores, bool [.., E]; `plain` knows no groups."""
    score = score.detach()
    if case.router_groups > 1 and not plain:
        members = score.unflatten(-1, (case.router_groups, -1))
        each = case.top_k // case.kept_groups
        of_groups = torch.topk(members, each, dim=-1).values.sum(-1)
        open_groups = _first(of_groups, case.kept_groups)[..., None]
        score = torch.where(open_groups, members, -torch.inf).flatten(-2)
    return _first(score, case.top_k)


def _first(score: Tensor, count: int) -> Tensor:
    ranked = torch.argsort(score, dim=-1, descending=True, stable=True)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, ranked[..., :count], True)


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
