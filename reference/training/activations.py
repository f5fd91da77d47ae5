"""Activations and their gradients: every module's output in micro-batch 0 of step 0, on all data ranks.

`act/<module>` is the output, `act_grad/<module>` the gradient in it of its micro-batch's SUMMED loss. The loss is over
counted tokens, not yet divided; times the first step's loss scale. Both are [dp*batch, seq, width], packed [dp,
batch*seq, width]; outputs per head are flattened to one width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch, micro_batch
from shardproof.reference.losses import cross_entropy as loss
from shardproof.reference.model import decoder
from shardproof.reference.model.branch import Beside, values_of
from shardproof.reference.training.scaling import LossScale


def observe(case: Case, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The activations of these full weights, on their device and in their dtype, and their gradients."""
    device = next(iter(weights.values())).device
    rows: dict[str, list[Tensor]] = {}
    places = [(micro, data_rank) for micro in range(case.micro) for data_rank in range(case.dp)]
    step = tuple(micro_batch(case, 0, micro, data_rank, device=device) for micro, data_rank in places)
    for batch in step[: case.dp]:
        for name, tensor in _observe_one(case, weights, batch, Beside(step=step)).items():
            rows.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in rows.items()}


def _observe_one(case: Case, weights: Mapping[str, Tensor], batch: Batch, beside: Beside) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    logits = decoder.logits(case, {**leaves, **values_of(case)}, batch, tap=outputs.__setitem__, beside=beside)
    acts = {f"act/{name}": output.detach().flatten(2) for name, output in outputs.items()}
    summed, _ = loss.summed(logits, batch.labels, batch.loss_mask, case.label_smoothing)
    slopes = torch.autograd.grad(sum(beside.losses, summed) * LossScale.of(case).value, list(outputs.values()))
    return acts | {f"act_grad/{name}": slope.flatten(2) for name, slope in zip(outputs, slopes, strict=True)}
