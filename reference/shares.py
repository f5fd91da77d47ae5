"""What a diagnosis asks of the dense model: the share of every micro-batch in a gradient, and what-ifs of the data.

A wrong gradient that is a sum of these shares with other weights tells which micro-batches or data ranks it counts
wrongly; an outcome that equals a what-if tells which rule of the data was not kept. All arithmetic is in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from reference import decoder, loss
from reference.activations import observe
from reference.batches import Batch, micro_batch
from reference.case import Case
from reference.packing import IGNORED
from reference.parameters import full, shapes
from reference.training import Feed, train

__all__ = ["alternatives", "shares"]


def shares(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Step 0 taken apart.

    grad/<parameter>   [dp, micro, ...]: the gradient of each micro-batch's summed loss over the tokens of the step
    tokens             [dp, micro]: how many tokens each counts
    start/<parameter>  the full weight before the first step
    """
    weights = _weights(case, device)
    places = [(data_rank, micro) for data_rank in range(case.dp) for micro in range(case.micro)]
    gradients: dict[str, list[Tensor]] = {name: [] for name in weights}
    tokens = []
    for data_rank, micro in places:
        leaves = {name: weight.requires_grad_() for name, weight in weights.items()}
        batch = micro_batch(case, 0, micro, data_rank, device=device)
        logits = decoder.logits(case, leaves, batch)
        summed, counted = loss.summed(logits, batch.labels, batch.loss_mask, case.label_smoothing)
        tokens.append(counted.double())
        for name, gradient in zip(leaves, torch.autograd.grad(summed, list(leaves.values())), strict=True):
            gradients[name].append(gradient)
    total, grid = torch.stack(tokens).sum(), (case.dp, case.micro)
    parted = {f"grad/{name}": (torch.stack(g) / total).unflatten(0, grid) for name, g in gradients.items()}
    start = {f"start/{name}": weight.detach() for name, weight in weights.items()}
    return parted | start | {"tokens": torch.stack(tokens).unflatten(0, grid)}


def alternatives(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The outcome and activations if the data were read otherwise: "<what if>/<name>" -> tensor, of the first step.

    `batch_repeated` is told by the second one.
    """
    found: dict[str, Tensor] = {}
    for word, change in _CHANGES.items():
        if change(micro_batch(case, 0, 0, 0)) is None:
            continue
        outcome = train(case.but(steps=1), _weights(case, device), feed=_reading(change))
        outcome |= observe(case, _weights(case, device), feed=_reading(change))
        found |= {f"{word}/{name}": tensor for name, tensor in outcome.items()}
    if case.steps > 1:
        again = train(case.but(steps=2), _weights(case, device), feed=_first_step)
        found |= {f"batch_repeated/{name}": again[name] for name in ("logits/1", "loss/1") if name in again}
    return found


def _first_step(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
    return micro_batch(case, 0, micro, dp_rank, device=device)


def _weights(case: Case, device: torch.device) -> dict[str, Tensor]:
    return {name: full(case, name).to(device, torch.float64) for name in shapes(case)}


_Change = Callable[[Batch], Batch | None]


def _reading(change: _Change) -> Feed:
    def feed(case: Case, step: int, micro: int, dp_rank: int, /, *, device: torch.device) -> Batch:
        batch = micro_batch(case, step, micro, dp_rank, device=device)
        return change(batch) or batch

    return feed


def _mask_ignored(batch: Batch) -> Batch:
    return dataclasses.replace(batch, loss_mask=torch.ones_like(batch.loss_mask))


def _padding_learned(batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=batch.labels.masked_fill(batch.labels == IGNORED, 0))


def _labels_unshifted(batch: Batch) -> Batch:
    return dataclasses.replace(batch, labels=batch.tokens.masked_fill(batch.labels == IGNORED, IGNORED))


def _borders_ignored(batch: Batch) -> Batch | None:
    return None if batch.cu_seqlens is None else dataclasses.replace(batch, cu_seqlens=None)


_CHANGES: dict[str, _Change] = {
    "mask_ignored": _mask_ignored,
    "padding_learned": _padding_learned,
    "labels_unshifted": _labels_unshifted,
    "borders_ignored": _borders_ignored,
}
"""What if -> the micro-batch read that way; None where it makes no difference."""
