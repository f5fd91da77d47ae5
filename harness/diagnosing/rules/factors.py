"""Wrong tensors that are the truth times one number, and which sizes of the case that number may come from.

A sum over an axis is named only where such a sum can happen to this very tensor (`_summable`). Where several sizes of
the case equal the factor, all of them are named: numbers alone cannot choose between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from harness.checking.evidence import Evidence, split_axes
from harness.checking.tolerance import kind_of
from harness.diagnosing.rules.causes import Cause
from harness.diagnosing.rules.patterns import explains, share_left
from harness.diagnosing.rules.places import blocks_of

__all__ = ["factor_of", "from_factor", "meaning_of"]

_NEAR = 1e-6
"""A factor is a size within this share of it, or within what rounding leaves of the error."""


def factor_of(value: Tensor, truth: Tensor) -> float | None:
    """The number that the truth is multiplied by in `value`; None when no number explains it."""
    x, t = value.double(), truth.double()
    power = float((t * t).sum())
    factor = float((x * t).sum()) / power if power else 0.0
    return factor if factor and explains(factor * t, value, truth) else None


def from_factor(evidence: Evidence, names: Sequence[str]) -> list[Cause]:
    """What one factor on all of these wrong tensors means; nothing when they do not share one."""
    values = {name: evidence.merged.tensors[name] for name in names if name in evidence.merged.tensors}
    factors = [factor_of(value, evidence.truth[name]) for name, value in values.items()]
    known = [factor for factor in factors if factor is not None]
    near = max((share_left(value) for value in values.values()), default=_NEAR)
    if not known or len(known) < len(names) or not all(_equal(factor, known[0], near) for factor in known):
        return []
    found, told = known[0], f"{'it is' if len(names) == 1 else 'all are'} {known[0]:.4g} x the truth"
    by_micro = _of_count(names, found, told, near, "micro", float(evidence.case.micro))
    causes = [*_of_axes(evidence, names, found, told, near), *by_micro]
    if not causes and "tokens" in evidence.shares:
        causes = _of_count(names, found, told, near, "tokens of the step", float(evidence.shares["tokens"].sum()))
    if not causes and _equal(found, -1, near):
        return [Cause(id="sign", words=f"{told}: the sign is wrong")]
    single = len(names) == 1 and evidence.truth[names[0]].numel() == 1  # any wrong number is a factor times the right
    return causes or ([] if single else [Cause(id="constant_factor", words=f"{told}: a constant factor is wrong")])


def meaning_of(evidence: Evidence, factor: float, told: str, near: float) -> list[Cause]:
    """What a factor on the updates of a step means when it is a size of the case; `told` says what it multiplies."""
    sizes = {**_sizes(evidence), "micro": evidence.case.micro}
    for known, power, meaning in (
        ("summed_twice", 1, "summed over it once too often, or not divided by it"),
        ("averaged", -1, "averaged over it where it must be summed, or divided again"),
    ):
        alike = [f"{axis}={n}" for axis, n in sizes.items() if n > 1 and _equal(factor, float(n) ** power, near)]
        if alike:
            return [Cause(id=known, words=f"{told}, and {' or '.join(alike)}: {meaning}")]
    return [Cause(id="sign", words=f"{told}: the sign is wrong")] if _equal(factor, -1, near) else []


def _equal(one: float, other: float, near: float) -> bool:
    return abs(one - other) <= near * abs(other)


def _of_axes(evidence: Evidence, names: Sequence[str], found: float, told: str, near: float) -> Iterator[Cause]:
    """Sums and means over axes that have this many ranks."""
    sizes = _sizes(evidence)
    summable = {axis: size for axis, size in sizes.items() if all(_summable(evidence, axis, name) for name in names)}
    forward = kind_of(names[0]) in ("act", "logits")
    several = (
        ("summed_twice", summable, 1, "summed over it once too often, or not divided by it"),
        ("averaged", summable if forward else sizes, -1, "averaged over it where it must be summed, or divided again"),
        ("summed_twice", summable, 2, "summed over it twice too often"),
        ("averaged", summable if forward else sizes, -2, "divided by it twice too often"),
    )
    for known, axes, power, meaning in several:
        if alike := [f"{axis}={size}" for axis, size in axes.items() if _equal(found, float(size) ** power, near)]:
            yield Cause(id=known, words=f"{told}, and {' or '.join(alike)}: {meaning}")
            return


def _of_count(names: Sequence[str], found: float, told: str, near: float, count: str, size: float) -> list[Cause]:
    """A number of micro-batches or of tokens, by which gradients and losses are divided."""
    known = size > 1 and (_equal(found, size, near) or _equal(found, 1 / size, near))
    if not known or kind_of(names[0]) in ("act", "logits"):
        return []
    too_often = "not divided by it, or multiplied once too often" if found > 1 else "divided by it once more"
    return [Cause(id="constant_factor", words=f"{told}, and {count}={size:g}: {too_often}")]


def _sizes(evidence: Evidence) -> dict[str, int]:
    """Axes that split something, and all ranks where they are more than those of any axis."""
    sizes, world = split_axes(evidence.case), evidence.case.world_size
    return sizes if world in sizes.values() else {**sizes, "all ranks": world}


def _summable(evidence: Evidence, axis: str, name: str) -> bool:
    """Whether a sum over this axis once more would multiply this tensor.

    It does where the ranks of a group hold the same part, and where they hold parts of what a reduce-scatter over the
    axis gave; ranks with other data (rows of an activation), or with other parts of a weight, would mix theirs.
    """
    ranks = evidence.axes.get(axis, (tuple(range(evidence.case.world_size)),))[0]
    blocks = blocks_of(evidence, name)
    regions = [tuple(block.region for block in blocks[rank]) for rank in ranks if rank in blocks]
    if len(set(regions)) <= 1:
        return True
    if kind_of(name) in ("act", "act_grad", "logits"):
        return len({tuple(region[0] for region in of_rank) for of_rank in regions}) == 1
    return any(event.op == "reduce_scatter" and event.axis == axis for event in evidence.events)
