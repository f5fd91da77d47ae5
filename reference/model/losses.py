"""The loss of the dense model, and the metric beside it, as sums over tokens.

The loss is cross entropy with loss mask, ignored labels (-100) and label smoothing. A token counts when its label is
not -100, with the weight of its loss mask. These are sums, not means: the caller divides by the count over all
micro-batches and data ranks. Smoothing follows Megatron-LM: the target gets 1 - a and every other of the V classes
a / (V - 1), where V is the vocabulary without padding.

The metric (metric=true) is what a training log has beside the loss: right tokens, tokens, log-likelihood, loss by
dataset. Each is a sum over the tokens of one data rank that count in the whole run. A token is right when no logit
exceeds its label's; label smoothing plays no part. Counts are int64, other numbers have the loss's dtype.
"""

import torch
from torch import Tensor

IGNORED = -100
"""The label of a token that is never learned."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and losses: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor, smoothing: float) -> Tensor:
    """The loss of every token [B, S], in float64 for float64 logits, else float32; 0 where the label is ignored."""
    log_BSV = logits_BSV.to(wide(logits_BSV.dtype)).log_softmax(-1)
    known_BS = labels_BS != IGNORED
    hit_BS = log_BSV.gather(-1, labels_BS.where(known_BS, 0)[..., None])[..., 0]
    loss_BS = -hit_BS
    if smoothing > 0:
        other_BS = (log_BSV.sum(-1) - hit_BS) / (log_BSV.shape[-1] - 1)
        loss_BS = -(1 - smoothing) * hit_BS - smoothing * other_BS
    return loss_BS.where(known_BS, 0)


def token_weights(labels_BS: Tensor, loss_mask_BS: Tensor) -> Tensor:
    """The weight with which every token counts [B, S], in the mask's dtype."""
    return loss_mask_BS * (labels_BS != IGNORED)


def summed_loss(
    logits_BSV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The micro-batch's summed loss and its token count, two scalars in the loss's dtype."""
    loss_BS = cross_entropy(logits_BSV, labels_BS, smoothing)
    weight_BS = token_weights(labels_BS, loss_mask_BS).to(loss_BS.dtype)
    return (loss_BS * weight_BS).sum(), weight_BS.sum()


MetricTotals = dict[str, Tensor]
"""`right` and `tokens` int64 [], `log_likelihood` []."""


def metric_totals(logits_BSV: Tensor, labels_BS: Tensor, loss_mask_BS: Tensor) -> MetricTotals:
    """The sums of one micro-batch."""
    x_BSV = logits_BSV.detach().to(wide(logits_BSV.dtype))
    place_BS = labels_BS.where(labels_BS != IGNORED, 0)
    counts_BS = token_weights(labels_BS, loss_mask_BS).to(x_BSV.dtype)
    hit_BS = x_BSV.gather(-1, place_BS[..., None])[..., 0]
    right_BS = (hit_BS >= x_BSV.amax(-1)) * counts_BS
    likelihood_BS = x_BSV.log_softmax(-1).gather(-1, place_BS[..., None])[..., 0] * counts_BS
    return {"right": right_BS.sum().long(), "tokens": counts_BS.sum().long(), "log_likelihood": likelihood_BS.sum()}


def metric_outcome(by_rank: list[MetricTotals], *, exact: bool) -> dict[str, Tensor]:
    """`metric/<name>` [dp], those by dataset [dp, datasets]. Without `exact` there is no `right` and no `right_of`: in
    them rounding decides which of two almost equal logits is larger.
    """
    right, tokens, likelihood = (
        torch.stack([sums[name] for sums in by_rank]) for name in ("right", "tokens", "log_likelihood")
    )
    found = {"tokens": tokens, "log_likelihood": likelihood, "loss_of": -likelihood[:, None]}
    if exact:
        found |= {"right": right, "right_of": right[:, None]}
    return {f"metric/{name}": value for name, value in found.items()}
