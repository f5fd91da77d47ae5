"""The truth that every subject is held against: dense training on one rank, without torch.distributed.

The truth of a low-precision case is computed in float64 from the weights rounded to the case's dtype. So a subject is
charged for its arithmetic only, never for the rounding of its inputs.

Where the loss grows without bound there is nothing to compare an implementation with, so the request is refused. The
refusal names the step in which the dense model diverges and a learning rate with which it was seen not to.

Shares of every micro-batch in a gradient are for a diagnosis: a wrong gradient that is a sum of these shares with other
weights shows which micro-batches or data ranks it counts wrongly. All arithmetic is in float64.

Cases that differ in how the work is split are equal to the dense model (`dense_case`). Masks and initial values that an
implementation draws must be given to it. It computes the choices of a learned router itself; from these follows how
many rows each rank sends.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch, shard_edges
from shardproof.reference.errors import CaseError
from shardproof.reference.features import WORDS
from shardproof.reference.model import decoder
from shardproof.reference.model import losses as loss
from shardproof.reference.model.branch import Beside
from shardproof.reference.model.parameters import full, shapes, weights
from shardproof.reference.model.randomness import given_mask, initial_deviation, masks, sites, takes_given
from shardproof.reference.training.control import refuse_decisive
from shardproof.reference.training.steps import train

SPLIT: Mapping[str, Any] = {
    word: field.metadata["dense"] for word, field in WORDS.items() if field.metadata["dense"] is not None
}
"""Words that say how the work is split, each with a value that goes with every other word."""


def dense_case(case: Case) -> Case:
    """The case with the words of SPLIT at their values for the dense model. It has the same truth, bit by bit.

    This is the case itself if its truth or its data depend on the split (see `reference.data.batches`), or its variant.
    """
    if case.truth_depends_on_split:
        return case
    try:
        found = replace(case, **SPLIT)
    except CaseError:
        return case
    return found if shard_edges(found) == shard_edges(case) else case


def list_given_kinds(case: Case) -> tuple[str, ...]:
    """The kinds of tensors that the implementation draws: truth, control and relu flips need these as `given`."""
    return (("mask",) if case.random == "stateful" else ()) + (("init",) if case.init == "shard" else ())


def without_draws(case: Case) -> Case:
    """The case with the field in place of what ranks draw: its truth needs no `given`, and has the same shapes."""
    found = case.but(random="field") if case.random == "stateful" else case
    return found.but(init="field") if case.init == "shard" else found


def drawn_values(case: Case) -> dict[str, Tensor]:
    """Random values of a case, as an outcome has them: masks, and initial values that are Megatron's."""
    names = [f"mask/{step}/{site}" for step in range(case.steps) for site in sites(case)]
    found = masks(case) if case.random == "field" else {name: given_mask(case, name) for name in names}
    if case.init == "whole":
        return found
    return {f"init/{name}": w for name, w in weights(case, torch.device("cpu")).items()} | found


def initial_deviations(case: Case) -> dict[str, float]:
    """The standard deviation of every parameter's initial values, by name; none where they are this project's own."""
    if case.init == "whole":
        return {}
    return {name: initial_deviation(case, name) for name in shapes(case)}


def dense_router_choices(case: Case) -> Mapping[tuple[int, str], Tensor]:
    """(step, layer) -> the experts of every token, bool [dp*micro*rows, seq, experts], rows as those of the logits."""
    return _router_choices(dense_case(case))


@lru_cache(maxsize=4)
def _router_choices(case: Case) -> Mapping[tuple[int, str], Tensor]:
    outcome = train(case, weights(case, torch.device("cpu")))
    found: dict[tuple[int, str], Tensor] = {}
    for name, chosen in outcome.items():
        kind, _, rest = name.partition("/")
        if kind == "routing":
            step, _, module = rest.partition("/")
            found[int(step), module.removesuffix(".mlp")] = chosen.bool()
    return found


GROWN = 1000.0
"""A loss this many times that of the first step (or 1, if that is more) has diverged."""
_ROWS = 1024
"""Rows of a parameter that are looked at together."""
_SLOWER = (0.1, 0.01, 0.001)
"""Shares of the learning rate that are tried."""


def first_diverged_step(case: Case, outcome: Mapping[str, Tensor]) -> int | None:
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


def refuse_divergence(case: Case, weights: Mapping[str, Tensor], outcome: Mapping[str, Tensor]) -> None:
    """Raise CaseError if this outcome of dense training in float64 diverges."""
    step = first_diverged_step(case, outcome)
    if step is None:
        return
    rule = f"the dense model diverges in step {step} (loss {float(outcome[f'loss/{step}']):.3g})"
    for share in _SLOWER:
        slower = case.but(lr=float(f"{case.lr * share:.2g}"))
        if first_diverged_step(slower, train(slower, weights, dtype=torch.float64)) is None:
            raise CaseError("lr", case.lr, rule, f"lr={slower.lr}")
    raise CaseError("steps", case.steps, rule, f"steps={max(step, 1)}")


def subject(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The outcome of dense training in the case's dtype: every tensor full."""
    return train(case, weights(case, device)) | drawn_values(case)


@takes_given
def truth(
    case: Case, device: torch.device, *, states: Mapping[str, Tensor] | None = None, observed: tuple[int, int] = (0, 0)
) -> dict[str, Tensor]:
    """The outcome and the activations of the `observed` step and micro-batch, with all arithmetic in float64.

    `given`: what the implementation drew, by name (`list_given_kinds`).
    `states`: the states that an implementation returned, from which every step begins (`reference.training.steps`).
    Raises CaseError for a case that diverges, if there are no `states` (`refuse_divergence`).
    """
    rounded = weights(case, device)
    outcome = train(case, rounded, dtype=torch.float64, states=states, observed=observed)
    refuse_decisive(case, rounded, outcome, states)
    if states is None:
        refuse_divergence(case, rounded, outcome)
    return drawn_values(case) | outcome


@takes_given
def shares(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The gradients and losses of step 0, micro-batch by micro-batch.

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
        summed, counted = loss.summed_loss(logits, batch.labels, batch.loss_mask, case.label_smoothing)
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
