"""Balance losses of this rank's own tokens: terms of the summed loss that push routers to use all experts alike.

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
from torch import Tensor

from parallel.communication.collectives import all_reduce
from parallel.communication.mesh import Mesh
from parallel.experts.router import scores, select
from reference.case import Case


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
