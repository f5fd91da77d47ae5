"""What one step of the optimizer did wrong, where a subject returns its state after every step.

The truth of such a state is the dense model's step from the subject's own state before it, so that what is wrong is
this step's alone: the parameters' update, or the gradient inside Adam's mean. Tested on numbers, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.tolerance import kind_of, step_of
from harness.diagnosing.rules.causes import Cause
from harness.diagnosing.rules.factors import meaning_of

__all__ = ["from_states"]

LEFT = 1e-4
"""A fit explains what is wrong when it leaves less than this share of it."""
CLOSE = 1e-4
"""A factor is that of clipping within this share of itself."""
LITTLE = 1e-2
"""An update by less than this share of the right one is next to nothing."""


def from_states(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """What the first step with a wrong state or norm did, from the parameters and moments of it that are wrong."""
    last = evidence.case.steps - 1
    step = last if kind_of(wrong[0]) == "param" else step_of(wrong[0])
    moments = _of_step(evidence, wrong, "exp_avg", step)
    moved = moments or _of_step(evidence, wrong, "param", step)
    if not moved:
        return []
    values, truths, befores = (torch.cat([part[i] for part in moved.values()]) for i in range(3))
    if moments:
        factor = _of_gradient(values, truths, befores)
        return _scaled(evidence, "gradients", step, factor) or _not_zeroed(evidence, moved, step)
    if still := _still(moved, step, last):
        return still
    got, right = values - befores, truths - befores
    said = _scaled(evidence, "updates", step, _factor(got, right)) or _not_zeroed(evidence, moved, step)
    rest = _factor(got - right, befores)
    if not said and rest is not None and 0 < rest < LITTLE:
        words = f"what is wrong in step {step} is {rest:.3g} x the parameters themselves: weight decay is left out"
        return [Cause(id="decay_missing", words=words)]
    return said


def _of_step(
    evidence: Evidence, wrong: Sequence[str], kind: str, step: int
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Parameter -> flat value, truth and state before, for those of a kind that are wrong after a step."""
    found = {}
    tensors = evidence.merged.tensors
    for name in wrong:
        after = name.startswith(f"{kind}_after/{step}/")
        if name not in tensors or not (after or (name.startswith(f"{kind}/") and step == evidence.case.steps - 1)):
            continue
        parameter = name.split("/", 2)[2] if after else name.partition("/")[2]
        before = tensors.get(f"{kind}_after/{step - 1}/{parameter}") if step else _start(evidence, kind, parameter)
        if before is not None:
            of_name = tensors[name], evidence.truth[name], before
            found[parameter] = (of_name[0].double().flatten(), of_name[1].double().flatten(), before.double().flatten())
    return found


def _start(evidence: Evidence, kind: str, parameter: str) -> Tensor | None:
    start = evidence.shares.get(f"start/{parameter}")
    return start if kind == "param" or start is None else torch.zeros_like(start)


def _factor(value: Tensor, truth: Tensor) -> float | None:
    """The number that `truth` is multiplied by in `value`; None when no number explains it."""
    power = float(truth @ truth)
    factor = float(value @ truth) / power if power else 0.0
    error = min(float(value.norm()), float((value - truth).norm()))
    fits = factor and float((value - factor * truth).norm()) <= LEFT * error
    return factor if fits else None


def _of_gradient(value: Tensor, truth: Tensor, before: Tensor) -> float | None:
    """The number that the gradients inside running means are multiplied by, whatever share they have in them."""
    wrong = value - truth
    known = torch.stack([truth, before], 1) if bool(before.any()) else truth[:, None]
    weights = torch.linalg.lstsq(known, wrong[:, None], driver="gelsd").solution[:, 0]
    fits = float((known @ weights - wrong).norm()) <= LEFT * float(wrong.norm())
    return 1 + float(weights[0]) if fits and bool(wrong.any()) else None


def _still(moved: Mapping[str, tuple[Tensor, Tensor, Tensor]], step: int, last: int) -> list[Cause]:
    """Parameters that stay where they were, all of them or some."""
    still = [name for name, (value, truth, before) in moved.items() if torch.equal(value, before)]
    if not still:
        return []
    if len(still) < len(moved) or step == 0:
        named = "the parameters" if len(still) == len(moved) else ", ".join(still[:3]) + " ..." * (len(still) > 3)
        return [Cause(id="never_updated", words=f"{named}: as before step {step}")]
    when = "the last step" if step == last else f"step {step}"
    words = f"the parameters are as before {when}: it was not taken, or came after they were read"
    return [Cause(id="step_missing", words=words)]


def _scaled(evidence: Evidence, what: str, step: int, factor: float | None) -> list[Cause]:
    """What one factor on all wrong updates or gradients of a step means."""
    if factor is None:
        return []
    told = f"the {what} of step {step} are {factor:.4g} x the right ones"
    largest, norm = getattr(evidence.case, "clip", 0.0), evidence.truth.get(f"grad_norm/{step}")
    if largest and norm is not None and math.isclose(factor, max(1.0, float(norm) / largest), rel_tol=CLOSE):
        return [Cause(id="unclipped", words=f"{told}: they are not clipped")]
    if largest and norm is not None and math.isclose(factor * float(norm), largest, rel_tol=CLOSE):
        return [Cause(id="clip_scales_up", words=f"{told}: a norm below the limit is scaled up to it")]
    if largest:  # any factor may come from a norm or a limit that is another one
        return []
    if said := meaning_of(evidence, factor, told, CLOSE):
        return said
    if 0 < factor < LITTLE:
        return [Cause(id="scaled_down", words=f"{told}: divided once more before the step")]
    return [Cause(id="constant_factor", words=f"{told}: a constant factor is wrong")]


def _not_zeroed(evidence: Evidence, moved: Mapping[str, tuple[Tensor, Tensor, Tensor]], step: int) -> list[Cause]:
    """Whether a later step holds the first one's gradient too."""
    old = [evidence.truth.get(f"grad/{name}") for name in moved]
    if not step:
        return []
    for (value, truth, _), gradient in zip(moved.values(), old, strict=True):
        # Which factor depends on what sums over ranks the old gradient went through again.
        if gradient is None or _factor(value - truth, gradient.double().flatten()) is None:
            return []
    words = f"step {step} holds the gradient of the first step once more: gradients are not set to zero in between"
    return [Cause(id="not_zeroed", words=words)]
