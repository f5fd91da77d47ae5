"""Whether the dense model itself stays where training can be judged, and with which learning rate it would.

Where the loss grows without bound there is nothing to compare an implementation with, so the request is refused. The
refusal names the step in which the dense model diverges and a learning rate with which it was seen not to.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import micro_batch
from reference.errors import CaseError
from reference.training.steps import Feed, train

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
