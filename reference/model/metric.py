"""Values of a training log beside the loss (metric=true): right tokens, tokens, log-likelihood, loss by dataset.

Sums over the tokens that count, of one data rank and the whole run. A token is right when no logit exceeds its label's;
label smoothing takes no part. Numbers in the loss's dtype, counts int64.
"""

import torch
from torch import Tensor

from shardproof.reference.losses.cross_entropy import IGNORED, counted, wide

DATASETS = 1
"""Number of datasets: a case has one corpus."""
Totals = dict[str, Tensor]
"""`right` and `tokens` int64 [], `log_likelihood` []."""


def totals(logits_BSV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor) -> Totals:
    """The sums of one micro-batch."""
    x_BSV = logits_BSV.detach().to(wide(logits_BSV.dtype))
    place_BS = labels_BS.where(labels_BS != IGNORED, 0)
    counts_BS = counted(labels_BS, loss_mask_BS).to(x_BSV.dtype)
    hit_BS = x_BSV.gather(-1, place_BS[..., None])[..., 0]
    right_BS = (hit_BS >= x_BSV.amax(-1)) * counts_BS
    likelihood_BS = x_BSV.log_softmax(-1).gather(-1, place_BS[..., None])[..., 0] * counts_BS
    return {"right": right_BS.sum().long(), "tokens": counts_BS.sum().long(), "log_likelihood": likelihood_BS.sum()}


def outcome(by_rank: list[Totals], *, exact: bool) -> dict[str, Tensor]:
    """`metric/<name>` [dp], of datasets [dp, datasets]. Without `exact`, none that depends on which of two logits,
    equal but for rounding, is larger.
    """
    right, tokens, likelihood = (
        torch.stack([sums[name] for sums in by_rank]) for name in ("right", "tokens", "log_likelihood")
    )
    found = {"tokens": tokens, "log_likelihood": likelihood, "loss_of": -likelihood[:, None]}
    if exact:
        found |= {"right": right, "right_of": right[:, None]}
    return {f"metric/{name}": value for name, value in found.items()}
