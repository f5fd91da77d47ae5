"""The truth that every subject is held against: dense training on one rank, without torch.distributed.

The truth of a low-precision case is computed in float64 from the weights rounded to the case's dtype. So a subject is
charged for its arithmetic only, never for the rounding of its inputs.

Where the loss grows without bound there is nothing to compare an implementation with, so the request is refused. The
refusal names the step in which the dense model diverges and a learning rate with which it was seen not to.

Shares of every micro-batch in a gradient are for a diagnosis: a wrong gradient that is a sum of these shares with other
weights shows which micro-batches or data ranks it counts wrongly. All arithmetic is in float64.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shardproof.reference import losses as loss
from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.errors import CaseError
from shardproof.reference.model import decoder
from shardproof.reference.model.branch import Beside
from shardproof.reference.model.parameters import full, shapes, weights
from shardproof.reference.model.randomness import takes_given
from shardproof.reference.training.control import refuse_decisive
from shardproof.reference.training.dense_case import drawn
from shardproof.reference.training.steps import Feed, train

GROWN = 1000.0
"""A loss this many times that of the first step (or 1, if that is more) has left what training can mean."""
_ROWS = 1024
"""Rows of a parameter that are looked at together."""
_SLOWER = (0.1, 0.01, 0.001)
"""Shares of the learning rate that are tried."""


def diverged_in(case: Case, outcome: Mapping[str, Tensor]) -> int | None:
    """The first step whose loss or gradient norm is not finite, or whose loss has grown by GROWN; None when none has.

    Parameters that are not finite after the last step count as that step's.
    """
    most = GROWN * max(1.0, float(outcome["loss/0"]))
    for step in range(case.steps):
        loss, norm = float(outcome[f"loss/{step}"]), float(outcome.get(f"grad_norm/{step}", 0.0))  # none when skipped
        if not math.isfinite(norm) or not loss <= most:
            return step
    left = (tensor for name, tensor in outcome.items() if name.startswith("param/"))
    finite = all(bool(torch.isfinite(rows).all()) for tensor in left for rows in tensor.split(_ROWS))
    return None if finite else case.steps - 1


def refuse_divergence(
    case: Case, weights: Mapping[str, Tensor], outcome: Mapping[str, Tensor], *, feed: Feed = micro_batch
) -> None:
    """Raise CaseError when this outcome of dense training on these micro-batches, in float64, diverges."""
    step = diverged_in(case, outcome)
    if step is None:
        return
    rule = f"the dense model diverges in step {step} (loss {float(outcome[f'loss/{step}']):.3g})"
    for share in _SLOWER:
        slower = case.but(lr=float(f"{case.lr * share:.2g}"))
        if diverged_in(slower, train(slower, weights, feed=feed, dtype=torch.float64)) is None:
            raise CaseError("lr", case.lr, rule, f"lr={slower.lr}")
    raise CaseError("steps", case.steps, rule, f"steps={max(step, 1)}")


def subject(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The outcome of dense training in the case's dtype: every tensor full."""
    return train(case, weights(case, device)) | drawn(case)


@takes_given
def truth(case: Case, device: torch.device, *, states: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Outcome and activations, with all arithmetic in float64.

    `given`: what it must be given, by name (see reference.training.dense_case).
    `states`: those that an implementation returned, from which every step begins (`reference.training.states`). Without
    them a case whose training leaves what can be judged raises CaseError (`refuse_divergence`).
    """
    rounded = weights(case, device)
    outcome = train(case, rounded, dtype=torch.float64, states=states, observed=True)
    refuse_decisive(case, rounded, outcome, states)
    if states is None:
        refuse_divergence(case, rounded, outcome)
    return drawn(case) | outcome


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
