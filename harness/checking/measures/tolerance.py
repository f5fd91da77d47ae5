"""How far a right result may be from the truth, and how far this one is.

There are three measures, and a right tensor is within the limits of all. `frobenius` = |x - t| / |t| over the whole
tensor sees diffuse errors. `peak` = max|x - t| / rms(t) sees one wrong row in a big tensor. `scale` = `|<x - t, t>| /
<t, t>` sees a wrong factor where rounding is large: independent roundings are nearly orthogonal to t. An element that
is right to OWN_EPSILONS of its own size is right however far it stands out, like the gradient of one token's logit
among thousands. Errors are plain ratios; `epsilons` counts them in the machine epsilon of the run dtype. Integers are
compared exactly, unless rounding changes them in control runs too.

In float64 the limit is 1e-9 for all (noise stays near 1e-13, the smallest known bugs near 1e-2). In other dtypes a
control run shows how far rounding alone carries a right result. It is the dense model in the run dtype with its sums in
another order. The limit is CONTROL_FACTOR times the worst control run, or CONTROL_FACTOR times the theoretical error of
a sum of that many terms (`measuring`) if that is more, and never less than a floor. In float64 control runs are needed
only beyond 1e-9: training that leaps about doubles its noise in every step. A single control run may be lucky (a relu
that flips, an update that amplifies), so more are run before an error beyond the limit counts. Two bounds are added to
the limit as they are: what a relu's kink may change, and what Adam may make of an element whose gradient is within
rounding of zero (`slack`).

A tensor within its limits proves nothing if it would be so too when multiplied by 0.5 or 1.5. `decidable` is False
then, and where `frobenius` may reach CEILING. Beyond CEILING a step leaps so far that a few control runs do not bound
it, so LEAP times as much is allowed; a bug is then wrong by orders of magnitude. If the truth is exactly 0 in a kind
that is 0 throughout, there is no size to scale by. There `absolute` errors are compared, and the limit is 0, or
CONTROL_FACTOR times what control runs have. Sources: TTrace (errors in epsilons), control runs as in DeepSpeedExamples
#1008.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardproof.harness.checking.measures.distance import Distance, TruthTensor, distance_from
from shardproof.harness.checking.measures.many_tensors import Numbers, blocks_of, compute, whole_of
from shardproof.harness.checking.measures.measured import (
    ABSOLUTE,
    EXACT,
    FLOAT64_ALLOWED,
    MEASURES,
    SCALE_SHARE,
    Measured,
    epsilon,
    measure_exact,
)

FLOOR_EPSILONS: Mapping[str, float] = {"frobenius": 4.0, "peak": 32.0}
"""No limit is smaller than this many epsilons of the dtype that stores the tensor."""
FLOAT64_CEILING = 1e-4
"""If noise may be as large as this in float64, training amplifies it without end, and later steps prove nothing."""
OWN_EPSILONS = 4.0
"""`peak` ignores an element within this many epsilons of the run dtype of its own truth. In float64 it ignores none."""
CONTROL_FACTOR = 6.0
"""A right result may be this many times as far from the truth as the worst control run."""
CEILING = 0.5
"""A limit of half of the tensor, as wide as this, would not notice a missing half of a sum."""
LEAP = 10.0
"""If rounding alone may change half of a low-precision tensor, the limits are multiplied by this."""
FACTORS = (0.5, 1.5)
"""A tensor is undecided if the tensor times one of these factors would be within its limits."""
SCALE_ALLOWED = 0.1
"""The factor of a right result, <x, t> / <t, t>, may be this far from 1, unless the limit of `frobenius` is less."""
ZERO_SHARE = 1e-10
"""A truth below this share of its kind's rms is zero but for rounding; its error is scaled by the rms of the kind."""
_SURE = 0.2
"""A tensor within e of the truth, times 0.5 or 1.5, is off by `0.5 - 1.5 e` at least: more than e while e is < 0.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controlled:
    """A floating-point truth, the least rms by which errors from it are scaled, and how far control `runs` are from it.

    It replaces the tensors of control runs, which need not be kept if they are large. `unstored`: how far the runs are
    from the truth without the rounding of storage.
    """

    true: TruthTensor
    least: float
    runs: tuple[Distance, ...] = ()
    unstored: tuple[Distance, ...] = ()

    @classmethod
    def of(cls, truth: Numbers, kind: float) -> "Controlled":
        """This truth before any control run; `kind` is the rms of its kind."""
        true = TruthTensor.of(truth)
        return cls(true=true, least=least_rms(true, kind) if math.isfinite(true.largest) else 0.0)

    def against(self, controls: Sequence[Numbers], stored: Numbers | None = None) -> "Controlled":
        """Add these control runs, tensors of its shape; `stored` is the rounding of each element when it is stored."""
        found = [distance_from(control, self.true, self.least) for control in controls]
        off = [] if stored is None else [distance_from(run, self.true, self.least, slack=stored) for run in controls]
        return replace(self, runs=(*self.runs, *found), unstored=(*self.unstored, *(off or found)))


def least_rms(true: TruthTensor, kind: float) -> float:
    """The smallest rms by which errors from this truth are scaled, given the rms of its kind.

    The gradient of a key bias, for example, is zero in mathematics. The rounding of its terms is an error of 100 %
    relative to itself, and a tiny one relative to the gradients in its terms.
    """
    return kind if true.rms < ZERO_SHARE * kind else SCALE_SHARE * kind


def own_share(dtype: str) -> float:
    """The share of its size by which an element may be off in this dtype without counting in `peak`."""
    return 0.0 if dtype == "float64" else OWN_EPSILONS * epsilon(dtype)


def measure(
    name: str,
    value: Numbers,
    truth: Numbers,
    *,
    dtype: str,
    kept: str = "",
    lower: str = "",
    controls: Sequence[Numbers] = (),
    amplified: Sequence[Numbers] = (),
    controlled: Controlled | None = None,
    relu_flips: Sequence[Tensor] = (),
    slack: Numbers | None = None,
    stored: Numbers | None = None,
    kind: float = 0.0,
    summed: float = 0.0,
) -> Measured:
    """Compare one tensor with the truth (same shape) as the run dtype allows; `kind` is the rms of its kind.

    `kept`: the dtype that stores the tensor if that is wider than the run's, such as float32 in a 16-bit case; it
    decides the smallest limit. `lower`: the lowest dtype whose rounding control runs have, if that is lower than the
    run's. `summed`: the relative error in theory of the sums that made the tensor; it counts like a control run.
    `controlled`: the distances of further control runs. `amplified`: control runs with CONTROL_FACTOR times as much
    rounding, whose errors are allowed as they are. `relu_flips`: what a relu within rounding of zero may change, each
    of the tensor's shape. `slack`: what an optimizer may make of gradients within rounding of zero, by element.
    `stored`: the most that storing rounds. Control runs store too, so there are two ways to account for it: as part of
    their rounding, or taken off the errors of the value and of them. A tensor is right if it is right in one way.
    """
    if isinstance(truth, Tensor) and not truth.is_floating_point() and not truth.is_complex():
        return _measure_whole(name, *map(whole_of, (value, truth)), *(map(whole_of, c) for c in (controls, amplified)))
    known = (controlled or Controlled.of(truth, kind)).against(controls, stored)
    true, least = known.true, known.least
    if true.largest == 0 == least and not (true.infinite or relu_flips) and slack is None and stored is None:
        return _beside_zeros(name, value, controls)
    own, ceiling = own_share(kept or dtype), CEILING if lower or dtype != "float64" else FLOAT64_CEILING
    theory = Distance(frobenius=summed, peak=summed * FLOOR_EPSILONS["peak"] / FLOOR_EPSILONS["frobenius"])

    def allow(stored: Numbers | None) -> Distance:
        runs = (*(known.runs if stored is None else known.unstored), theory)
        bound = [distance_from(run, true, least, slack=stored) for run in amplified]
        flipped = [compute(torch.add, truth, flip) for flip in relu_flips]
        return _allowed_distance(dtype, kept or dtype, true, runs, bound, flipped, least)

    ways = [(_added(slack, stored), allow(stored)), *([] if stored is None else [(slack, allow(None))])]
    leap = LEAP if dtype != "float64" and ways[0][1].frobenius >= CEILING else 1.0
    ways = [(off, limit.times(leap)) for off, limit in ways]
    found = [distance_from(value, true, least, own, off) for off, _ in ways]
    (_, which), way = min((found[number].worstratio(allowed), number) for number, (_, allowed) in enumerate(ways))
    (off, allowed), error = ways[way], getattr(found[way], which)
    return Measured(
        name=name,
        measure=which,
        error=error,
        allowed=getattr(allowed, which),
        epsilons=error / epsilon(lower or dtype),
        decidable=all(_is_decidable(ceiling, value, true, least, own, *one) for one in ways),
        loose=0 if off is None else _count_loose(off, dtype, max(one.peak for _, one in ways) * max(true.rms, least)),
        elements=truth.numel(),
        zero=true.rms < ZERO_SHARE * least and allowed.frobenius < CEILING,
    )


def _added(one: Numbers | None, other: Numbers | None) -> Numbers | None:
    return one if other is None else other if one is None else compute(torch.add, one, other)


def _beside_zeros(name: str, value: Numbers, controls: Sequence[Numbers]) -> Measured:
    """A tensor whose truth, and all of its kind, is 0 throughout."""
    sizes = [TruthTensor.of(tensor) for tensor in (value, *controls)]
    error, *known = (math.inf if one.infinite or not math.isfinite(one.largest) else one.largest for one in sizes)
    allowed = CONTROL_FACTOR * max(known, default=0.0)
    return Measured(name=name, measure=ABSOLUTE, error=error, allowed=allowed, epsilons=error, elements=value.numel())


def _measure_whole(
    name: str, value: Tensor, truth: Tensor, controls: Iterable[Tensor], amplified: Iterable[Tensor]
) -> Measured:
    """Integers. They may differ as far as rounding carries them in control runs, but then they decide nothing."""
    found = measure_exact(name, value, truth)
    if found.right or value.shape != truth.shape:
        return found

    def differences(tensors: Iterable[Tensor]) -> list[float]:
        return [float((tensor.double() - truth.double()).abs().sum()) for tensor in tensors]

    (error,) = differences([value])
    allowed = max([*(CONTROL_FACTOR * one for one in differences(controls)), *differences(amplified)], default=0.0)
    if not allowed:
        return found
    return Measured(name=name, measure=EXACT, error=error, allowed=allowed, epsilons=error, decidable=False)


def _allowed_distance(
    dtype: str,
    kept: str,
    true: TruthTensor,
    honest: Sequence[Distance],
    bound: Sequence[Distance],
    kinked: Sequence[Numbers],
    least: float,
) -> Distance:
    """The distance that the run dtype allows. `scale` never exceeds `frobenius`, so it needs no smaller limit."""
    moved = [distance_from(kink, true, least) for kink in kinked]
    limits = {}
    for name in MEASURES:
        if name == "scale":
            floor = SCALE_ALLOWED
        else:
            floor = FLOAT64_ALLOWED if dtype == "float64" else FLOOR_EPSILONS[name] * epsilon(kept)
        limit = max(
            [floor, *(CONTROL_FACTOR * getattr(run, name) for run in honest), *(getattr(run, name) for run in bound)]
        )
        limits[name] = limit + max([getattr(run, name) for run in moved], default=0.0)
    limits["scale"] = min(limits["scale"], limits["frobenius"])
    return Distance(**limits)


def _is_decidable(
    ceiling: float,
    value: Numbers,
    true: TruthTensor,
    least: float,
    own: float,
    slack: Numbers | None,
    allowed: Distance,
) -> bool:
    """Whether this tensor times each of FACTORS would be beyond its limits, and these are below their ceiling."""
    if allowed.frobenius >= ceiling:
        return False
    if slack is None and allowed.frobenius < _SURE and true.rms >= least:
        return True  # the tensor is wrong, or within _SURE of the truth, so that half of it would be beyond the limit
    return all(distance_from(value, true, least, own, slack, by).worstratio(allowed)[0] > 1 for by in FACTORS)


def _count_loose(slack: Numbers, dtype: str, limit: float) -> int:
    """How many elements may be off by more than the limit of `peak`, or in float64 by more than noise can be."""
    share = FLOAT64_CEILING / FLOAT64_ALLOWED if dtype == "float64" else 1.0
    return sum(int((block > share * limit).sum()) for block in blocks_of(slack))
