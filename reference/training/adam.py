"""Range of Adam under gradients within rounding of zero: how far a right parameter may be from the dense model's.

Adam divides a gradient by its own size. So rounding alone can make a full step of a gradient that is 0 in exact
arithmetic, as that of a key's bias is: softmax does not depend on it. With p, m, v before a step and its gradient g,

    p' = p (1 - lr decay) - lr f(g)        f(g) = (b1 m + (1 - b1) g) / c1 / (sqrt((b2 v + (1 - b2) g^2) / c2) + eps)

where c = 1 - b^(step + 1). Every element's g is known up to a noise n. The slack is the most by which lr f differs from
its value at g anywhere in [g - n, g + n]. f has at most two stationary points, so its extremes are among five values.
Where g is much larger than n, the slack is tiny. Source: Kingma & Ba 2015; torch.optim.AdamW for eps and decay.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import stored_tensors
from shardproof.reference.model.parameters import shapes

BETAS = (0.9, 0.999)
EPS = 1e-8
FLOAT64_NOISE = 1e-12
"""The noise of a gradient in float64, in units of the largest rms of a gradient: a thousandth of its tolerance.

In other dtypes control runs show it, with one epsilon as the minimum.
"""
_CONTROL_FACTOR = 6.0
"""A right gradient may be this many times further from the truth than that of the worst control run."""

_ANYTHING = 1e30
"""The noise if a control run is not finite. Its square still is."""


def bound_adam(
    case: Case, states: Mapping[str, Tensor], truth: Mapping[str, Tensor], controls: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The largest error of every element, by name (`param_after/<step>/<param>`, `param/<param>`); {} for sgd.

    `states` are those from which the steps of `truth` and `controls` began (see reference.training.steps). Gradients
    are derived from the moments before and after a step. Skipped steps change no moments, and Adam does not count them.
    """
    first, found = next(iter(shapes(case))), {}
    taken = int(stored_tensors(case).get(f"optimizer.state.{first}.step", 0)) if case.load else 0
    for step in range(case.steps):
        if f"exp_avg_after/{step}/{first}" not in truth or truth.get(f"skipped/{step}"):
            continue
        before = {name: _before(case, name, step, states, shape) for name, shape in shapes(case).items()}
        gradients = {name: _gradient(truth, step, name, before[name][0]) for name in before}
        largest = max(float(g.square().mean().sqrt()) for g in gradients.values())
        floor = largest * (FLOAT64_NOISE if case.dtype == "float64" else torch.finfo(getattr(torch, case.dtype)).eps)
        for name, (mean, square) in before.items():
            others = [_gradient(control, step, name, mean) for control in controls]
            noise = _noise(gradients[name], others, floor)
            kept = f"param_after/{step}/{name}" if step < case.steps - 1 else f"param/{name}"
            found[kept] = case.lr * rounding_slack(gradients[name], noise, mean, square, taken)
        taken += 1
    return found


def rounding_slack(g: Tensor, noise: Tensor, mean: Tensor, square: Tensor, step: int) -> Tensor:
    """The most by which f differs from f(g) within `noise` of g, by element; all of one shape, in float64."""
    b1, b2 = BETAS
    c1, c2 = 1 - b1 ** (step + 1), 1 - b2 ** (step + 1)
    low, high = g - noise, g + noise

    def f(at: Tensor) -> Tensor:
        size = ((b2 * square + (1 - b2) * at.square()) / c2).sqrt() + EPS
        return (b1 * mean + (1 - b1) * at) / c1 / size

    here = f(g)
    places = [low, high, *(root.clamp(low, high) for root in _stationary(mean, square, c2))]
    return torch.stack([(f(place) - here).abs() for place in places]).amax(0)


def _stationary(mean: Tensor, square: Tensor, c2: float) -> list[Tensor]:
    """Zeros of f', 0 if there is none.

    With `a = b1 m, b = 1 - b1, c = b2 v / c2, d = (1 - b2) / c2` and `s = sqrt(c + d g^2)`, they are at `b s (s + eps)
    = (a + b g) d g`. Hence `s = (a d g - b c) / (b eps)`, a quadratic equation in g.
    """
    b1, b2 = BETAS
    a, b, c, d = b1 * mean, 1 - b1, b2 * square / c2, (1 - b2) / c2
    two, one = (a * d).square() - (b * EPS) ** 2 * d, -2 * a * b * c * d
    none = (b * c).square() - (b * EPS) ** 2 * c
    root = (one.square() - 4 * two * none).clamp_min(0.0).sqrt()
    return [((-one + sign * root) / (2 * two)).nan_to_num(0.0, 0.0, 0.0) for sign in (1, -1)]


def _before(
    case: Case, name: str, step: int, states: Mapping[str, Tensor], shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The means of gradients and of their squares before a step."""
    if f"exp_avg_after/{step - 1}/{name}" not in states:  # no step has been taken
        if case.load and f"optimizer.state.{name}.exp_avg" in (found := stored_tensors(case)):
            mean, square = (found[f"optimizer.state.{name}.{moment}"] for moment in ("exp_avg", "exp_avg_sq"))
            return mean.double(), square.double()
        nothing = torch.zeros(shape, dtype=torch.float64)
        return nothing, nothing
    mean, square = (states[f"{moment}_after/{step - 1}/{name}"] for moment in ("exp_avg", "exp_avg_sq"))
    return mean.double(), square.double()


def _gradient(outcome: Mapping[str, Tensor], step: int, name: str, mean: Tensor) -> Tensor:
    """The gradient that took this mean from one step to the next: m' = b1 m + (1 - b1) g."""
    return (outcome[f"exp_avg_after/{step}/{name}"].double() - BETAS[0] * mean) / (1 - BETAS[0])


def _noise(gradient: Tensor, others: Sequence[Tensor], floor: float) -> Tensor:
    """The largest error of the elements of a right gradient."""
    gaps = [_CONTROL_FACTOR * float((other - gradient).abs().max()) for other in others]
    return torch.full_like(gradient, max(floor, *(gap if gap < _ANYTHING else _ANYTHING for gap in gaps), 0.0))
