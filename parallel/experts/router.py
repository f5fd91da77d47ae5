"""The router of one layer: logits of this rank's own tokens, which experts they go to, and with what weight.

    softmax       select the largest logits; weights are the softmax of those selected
    pre-softmax   the same selection; weights are their shares of the softmax over all experts, not normalised again
    sigmoid       weights are the sigmoids of those selected, divided by their sum where there are several

Of equal scores the one with the smaller number is selected: `torch.topk` promises nothing. All times `router_scale`.
With `router_groups` only the experts of `kept_groups` may be selected, of those with the largest sums of their best
scores, top_k / kept_groups of each. With `bias_rate` a bias is added to sigmoids where they are selected alone.
Letters: T tokens, E experts. Source: Megatron-Core 0.16.1 `topk_routing_with_score_function` (experts.md 21.1).

Balance losses are terms of the summed loss that push routers to use all experts alike:

    aux_loss        E/(K T^2) * sum over experts of (its rows) * (the sum of its scores)     T tokens of a micro-batch
    sequence_loss   the same of every row, and the mean over rows
    global_loss     the same of the micro-batches that all data ranks have at once, the mean over data ranks
    z_loss          1/T * the sum of logsumexp(logits)^2

With balance_of=counted T are the tokens whose loss counts, summed over these ranks beside the rows of experts. Rows are
those of all ranks that hold the micro-batch (or, for global_loss, one of them), one all-reduce of integers each. Scores
are this rank's own, so that the terms of all ranks add up to the loss. Each is times T, for a step's gradients are
divided by its counted tokens in the end. Megatron's per-token mode took the rank's own number for T (experts.md 21.5,
X1). Scores are the softmax, or shares of sigmoids; choices are those without groups and bias. Source: Megatron-Core
0.16.1 `switch_load_balancing_loss_func`, `z_loss_func`; arXiv:2101.03961, 2202.08906.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.mesh import Mesh
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of


def has_balance(case: Case) -> bool:
    """Has the case a balance loss?"""
    return any((case.aux_loss, case.sequence_loss, case.global_loss, case.z_loss))


def balance_term(case: Case, mesh: Mesh, logits_BSE: Tensor, chosen_BSE: Tensor, counted_BS: Tensor | None) -> Tensor:
    """All terms of this rank's tokens, or of those that are `counted_BS`, []; a forced choice counts as it is."""
    share_BSE = scores(case, logits_BSE)
    if case.routing == "learned":
        chosen_BSE = select(case, share_BSE, plain=True)
    factor, term = case.experts / case.top_k, logits_BSE.new_zeros(())
    if counted_BS is not None:
        share_BSE, chosen_BSE = share_BSE * counted_BS[..., None], chosen_BSE & counted_BS[..., None]
    if case.aux_loss and counted_BS is None:
        rows_E = all_reduce(chosen_BSE.sum((0, 1)), mesh.axis("tp_cp"))
        balance = (rows_E * share_BSE.sum((0, 1))).sum() * factor / case.tokens**2
        term = term + case.aux_loss * case.tokens * balance
    elif case.aux_loss and counted_BS is not None:
        mine = torch.cat([chosen_BSE.sum((0, 1)), counted_BS.sum()[None]])
        *_, tokens = rows_E = all_reduce(mine, mesh.axis("tp_cp"))
        balance = (rows_E[:-1] * share_BSE.sum((0, 1))).sum() * factor / tokens.clamp(min=1)
        term = term + case.aux_loss * balance
    if case.global_loss:
        rows_E = all_reduce(chosen_BSE.sum((0, 1)), mesh.axis("tp_cp_dp"))
        balance = (rows_E * share_BSE.sum((0, 1))).sum() * factor / case.tokens**2 / case.dp
        term = term + case.global_loss * case.tokens * balance
    if case.sequence_loss:
        rows_BE = all_reduce(chosen_BSE.sum(1), mesh.axis("tp_cp"))
        balance = (rows_BE * share_BSE.sum(1)).sum() * factor / case.row_tokens**2 / case.rows
        term = term + case.sequence_loss * case.tokens * balance
    if case.z_loss:
        logits_BSE = logits_BSE if counted_BS is None else logits_BSE[counted_BS]
        term = term + case.z_loss * torch.logsumexp(logits_BSE, -1).square().sum()
    return term


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
