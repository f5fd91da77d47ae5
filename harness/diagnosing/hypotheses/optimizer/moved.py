"""Updates of a step of the optimizer: wrong tensors of one kind of state beside their truth and the state before.

Elements that Adam may have made out of rounding (`Evidence.slack`) are left out: no hypothesis speaks of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardproof.harness.checking.evidence import Evidence

LEFT = 1e-4
"""A fit explains what is wrong when it leaves less than this share of it."""
LOOSE = 1e-6
"""Share of its own movement that Adam may have made of rounding in an element that is still looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """All wrong tensors of a kind after one step, flat and end to end in float64.

    `states` are their names, `names` those of their parameters.
    `beside`: other tensors of the same elements, where all are known. They are the parameters before this step
    ("parameter") and how far the step before moved them ("last"). Then come the moments after it ("mean", "square") and
    the first step's gradients ("gradient").
    """

    names: tuple[str, ...]
    states: tuple[str, ...]
    value: Tensor
    truth: Tensor
    before: Tensor
    beside: Mapping[str, Tensor]
    sizes: tuple[int, ...]

    def apart(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Elements of all parameters -> those of each."""
        parts: tuple[Tensor, ...] = flat.split(list(self.sizes))
        return parts

    @property
    def got(self) -> Tensor:
        """By how much the step moved them."""
        return self.value - self.before

    @property
    def right(self) -> Tensor:
        """By how much it should have."""
        return self.truth - self.before


def of_kind(evidence: Evidence, wrong: Sequence[str], kind: str, step: int) -> Iterator[tuple[str, str]]:
    """(name, parameter) of the wrong states of a kind after this step; the last one's parameters are `param/`."""
    for name in wrong:
        if name.startswith(f"{kind}_after/{step}/"):
            yield name, name.split("/", 2)[2]
        elif name.startswith(f"{kind}/") and step == evidence.case.steps - 1:
            yield name, name.partition("/")[2]


def before_step(evidence: Evidence, kind: str, step: int, parameter: str) -> Tensor | None:
    """The full state of a parameter before this step: moments begin as zeros. None when it is not known."""
    if step:
        return evidence.merged.tensors.get(f"{kind}_after/{step - 1}/{parameter}")
    start = evidence.shares.get(f"start/{parameter}")
    return start if kind == "param" or start is None else torch.zeros_like(start)


def moved(evidence: Evidence, wrong: Sequence[str], kind: str, step: int) -> Moved | None:
    """The wrong states of a kind after this step; None when there are none whose state before is known."""
    rows: list[dict[str, Tensor | None]] = []
    names, states = [], []
    for name, parameter in of_kind(evidence, wrong, kind, step):
        before, value = before_step(evidence, kind, step, parameter), evidence.merged.tensors.get(name)
        if before is None or value is None:
            continue
        truth, slack = evidence.truth[name].double(), evidence.slack.get(name)
        row = {"value": value, "truth": truth, "before": before, **_beside(evidence, step, parameter)}
        sure = ... if slack is None else slack.double() <= LOOSE * (truth - before.double()).abs()
        rows.append({part: None if t is None else t.double()[sure].flatten() for part, t in row.items()})
        names.append(parameter)
        states.append(name)
    if not names:
        return None
    known = [part for part in rows[0] if all(row[part] is not None for row in rows)]
    flat = {part: torch.cat([tensor for row in rows if (tensor := row[part]) is not None]) for part in known}
    value, truth, before = (flat.pop(part) for part in ("value", "truth", "before"))
    sizes = tuple(len(row["value"]) for row in rows if row["value"] is not None)
    return Moved(
        names=tuple(names), states=tuple(states), value=value, truth=truth, before=before, beside=flat, sizes=sizes
    )


def _beside(evidence: Evidence, step: int, parameter: str) -> dict[str, Tensor | None]:
    tensors, now = evidence.merged.tensors, before_step(evidence, "param", step, parameter)
    earlier = before_step(evidence, "param", step - 1, parameter) if step else None
    return {
        "parameter": now,
        "last": None if now is None or earlier is None else now.double() - earlier.double(),
        "mean": tensors.get(f"exp_avg_after/{step}/{parameter}"),
        "square": tensors.get(f"exp_avg_sq_after/{step}/{parameter}"),
        "gradient": evidence.truth.get(f"grad/{parameter}"),
    }


def times(value: Tensor, truth: Tensor) -> float | None:
    """The number that `truth` is multiplied by in `value`; None when no number explains it."""
    power = float(truth @ truth)
    factor = float(value @ truth) / power if power else 0.0
    error = min(float(value.norm()), float((value - truth).norm()))
    fits = factor and float((value - factor * truth).norm()) <= LEFT * error
    return factor if fits else None


def fitted(value: Tensor, truth: Tensor, other: Tensor) -> tuple[float, float] | None:
    """(a, b) with value = a truth + b other; b is 0 where `other` is. None when no such sum explains the value."""
    known = torch.stack([truth, other], 1) if bool(other.any()) else truth[:, None]
    error = float((value - truth).norm())
    if not error or not math.isfinite(error + float(known.norm())) or len(value) < 2 * known.shape[1]:
        return None
    sizes = known.norm(dim=0).clamp(min=1e-300)
    weights = torch.linalg.lstsq(known / sizes, value[:, None], driver="gelsd").solution[:, 0] / sizes
    explained = float((known @ weights - value).norm()) <= LEFT * error
    return (float(weights[0]), float(weights[1]) if len(weights) > 1 else 0.0) if explained else None
