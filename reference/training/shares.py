"""Shares of every micro-batch in a gradient: a diagnosis computes them with the dense model.

A wrong gradient that is a sum of these shares with other weights shows which micro-batches or data ranks it counts
wrongly. All arithmetic is in float64.
"""

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.losses import cross_entropy as loss
from shardproof.reference.model import decoder
from shardproof.reference.model.branch import Beside
from shardproof.reference.model.given import takes_given
from shardproof.reference.model.parameters import full, shapes


@takes_given
def shares(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Step 0 taken apart.

    grad/<parameter>   [dp, micro, ...]: the gradient of each micro-batch's summed loss over the tokens of the step
    loss               [dp, micro]: each one's summed loss over the tokens of the step
    tokens             [dp, micro]: how many tokens each counts
    start/<parameter>  the full weight before the first step
    """
    weights = {name: full(case, name).to(device, torch.float64) for name in shapes(case)}
    places = [(data_rank, micro) for data_rank in range(case.dp) for micro in range(case.micro)]
    batches = [micro_batch(case, 0, micro, data_rank, device=device) for data_rank, micro in places]
    gradients: dict[str, list[Tensor]] = {name: [] for name in weights}
    tokens, losses = [], []
    for batch in batches:
        leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
        beside = Beside(step=batches)
        logits = decoder.logits(case, leaves, batch, beside=beside)
        summed, counted = loss.summed(logits, batch.labels, batch.loss_mask, case.label_smoothing)
        tokens.append(counted.double())
        losses.append(summed.detach().double())
        slopes = torch.autograd.grad(sum(beside.losses, summed), list(leaves.values()))
        for name, gradient in zip(leaves, slopes, strict=True):
            gradients[name].append(gradient)
    total, grid = torch.stack(tokens).sum(), (case.dp, case.micro)
    parted = {f"grad/{name}": (torch.stack(g) / total).unflatten(0, grid) for name, g in gradients.items()}
    start = {f"start/{name}": weight.detach() for name, weight in weights.items()}
    counts = {"tokens": torch.stack(tokens), "loss": torch.stack(losses) / total}
    return parted | start | {name: count.unflatten(0, grid) for name, count in counts.items()}
