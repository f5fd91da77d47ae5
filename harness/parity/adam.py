"""What Adam may make of rounding in a gradient: the step of an element follows the sign of a gradient near zero.

The program does not state rate and betas of a step, so both are taken from the step itself: where rounding is small,
the movement is `rate * m / sqrt(v)`, with m and v the moments after the step. An error e of m moves an element by `rate
* e / sqrt(v)`, and never by more than twice the largest step.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardproof.harness.checking.measures.tolerance import CONTROL_FACTOR

_LEAST = 1e-2
"""Elements whose moment is above this share of the largest one show the rate."""


def adam_bound(
    truth: Mapping[str, Tensor],
    initial: Mapping[str, Tensor],
    controls: Sequence[Mapping[str, Tensor]],
    assumed: float = 0.0,
) -> dict[str, Tensor]:
    """By name of a parameter after a step: how far every element may be off because Adam follows rounding.

    Control runs show how far rounding takes the moments; without them it is taken to be `assumed` times the largest
    element. Empty if that is 0, and for other optimizers.
    """
    found: dict[str, Tensor] = {}
    for name, after in truth.items() if controls or assumed else ():
        kind, _, place = name.partition("/")
        if kind != "param_after":
            continue
        step, _, parameter = place.partition("/")
        means, squares = truth.get(f"exp_avg_after/{place}"), truth.get(f"exp_avg_sq_after/{place}")
        before = initial.get(parameter) if step == "0" else truth.get(f"param_after/{int(step) - 1}/{parameter}")
        if means is None or squares is None or before is None or before.numel() != after.numel():
            continue
        moved = (after.double() - before.double().reshape(after.shape)).abs()
        m, root = means.double().abs(), squares.double().clamp(min=0).sqrt()
        share = m / root.clamp(min=torch.finfo(torch.float64).tiny)
        seen = (m > _LEAST * m.max()) & (share > 0) if m.numel() else m.bool()
        if not bool(seen.any()):
            continue
        rate = float((moved[seen] / share[seen]).median())
        errors = [(control[key].double() - means.double()).square().mean().sqrt() for control in controls
                  if (key := f"exp_avg_after/{place}") in control]  # fmt: skip
        error = CONTROL_FACTOR * max(map(float, errors)) if errors else assumed * float(m.max())
        largest = 2 * rate * float(share.max())
        found[name] = (rate * error / root.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=largest)
    return found
