"""One forward and backward of the dense model on given weights: logits, mean loss, and every gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import Batch
from reference.model import decoder, loss
from reference.model.parameters import weights

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseRun:
    """Logits [B, S, vocab], the mean loss over counted tokens, and its gradient in each parameter."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def dense_run(case: Case, batch: Batch, values: dict[str, Tensor] | None = None) -> DenseRun:
    """Run the case's weights, or these instead, on one batch."""
    leaves = {name: value.clone().requires_grad_() for name, value in (values or weights(case, CPU)).items()}
    logits = decoder.logits(case, leaves, batch)
    summed, tokens = loss.summed(logits, batch.labels, batch.loss_mask, case.label_smoothing)
    mean = summed / tokens
    mean.backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return DenseRun(logits=logits.detach(), loss=mean.detach(), gradients=gradients)


def ignored_labels(batch: Batch) -> Tensor:
    """The batch's labels with every token that does not count set to -100."""
    return batch.labels.where(batch.loss_mask > 0, -100)


def largest_difference(found: Tensor, right: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest element of the right one."""
    assert found.shape == right.shape, (found.shape, right.shape)
    return float((found - right.detach()).abs().max() / right.detach().abs().max())
