"""The dense subject: the case on one rank, without torch.distributed, and the truth that every subject is held against.

The truth of a low-precision case is computed in float64 from the weights rounded to the case's dtype. So a subject is
charged for its arithmetic only, never for the rounding of its inputs.

Where the loss grows without bound there is nothing to compare an implementation with, so the request is refused. The
refusal names the step in which the dense model diverges and a learning rate with which it was seen not to.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.errors import CaseError
from shardproof.reference.model.given import takes_given
from shardproof.reference.model.parameters import weights
from shardproof.reference.training.given import drawn
from shardproof.reference.training.kinks import refuse_decisive
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
    """Outcome and activations (see reference.training.activations), with all arithmetic in float64.

    `given`: what it must be given, by name (see reference.training.given).
    `states`: those that an implementation returned, from which every step begins (`reference.training.states`). Without
    them a case whose training leaves what can be judged raises CaseError (`refuse_divergence`).
    """
    rounded = weights(case, device)
    outcome = train(case, rounded, dtype=torch.float64, states=states, observed=True)
    refuse_decisive(case, rounded, outcome, states)
    if states is None:
        refuse_divergence(case, rounded, outcome)
    return drawn(case) | outcome


def activations(case: Case, device: torch.device) -> dict[str, Tensor]:
    """`act/<module>` and `act_grad/<module>` of the dense model in its dtype (see reference.training.activations)."""
    from shardproof.reference.training.activations import observe  # noqa: PLC0415

    return observe(case, weights(case, device))


def true_activations(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Activations with all arithmetic in float64; for float64 cases they are `activations`."""
    from shardproof.reference.training.activations import observe  # noqa: PLC0415

    return observe(case, {name: weight.to(torch.float64) for name, weight in weights(case, device).items()})
