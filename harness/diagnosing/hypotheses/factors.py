"""Wrong tensors that are the truth times one number, and which sizes of the case that number may come from.

A sum over an axis is named only where such a sum can happen to this very tensor (`summable`). Where several sizes of
the case equal the factor, or a constant might, `Evidence.others` decides: the same subject in cases with another size.
A factor that follows the size comes from it, one that stays is a constant. Without such cases all sizes that fit are
named: numbers of one case alone cannot choose between them.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.diagnosing.causes.cause import Cause, claimed
from shardproof.harness.diagnosing.causes.hypothesis import OF_TOKENS, VALUES, Failure, Hypothesis, of_values
from shardproof.harness.diagnosing.causes.places import summable
from shardproof.harness.diagnosing.causes.proofs import (
    FEWEST_OF_A_FACTOR,
    SINGLE,
    Explained,
    explains,
    independent,
    share_left,
    times,
)
from shardproof.harness.diagnosing.hypotheses.patterns import is_count
from shardproof.harness.mesh_axes import split_axes

Predict = Callable[[float], tuple[Explained, ...]]
"""A factor -> its predictions for the wrong tensors."""
Measure = Callable[[Evidence], float | None]
"""Evidence of another case -> the factor on the same tensor or part there; None when it shows none."""
_NEAR = 1e-6
"""A factor is a size within this share of it, or within what rounding leaves of the error."""
_LARGE = 3
"""From this size on a factor that equals it is no constant by chance."""
UNDECIDED = " (a constant factor would look the same)"
"""Behind a factor that is a size of the case, where no case of another size decides."""
_DEPTH = ("2 x layers",)
"""Size whose root divides the initial weights of linears that add to the residual stream."""
_SUMS = (("summed_twice", 1), ("averaged", -1), ("summed_twice", 2), ("averaged", -2))
"""(cause, power of an axis)."""
_ROOTS = {1: "", 2: "the square of ", 0.5: "the root of "}
_POWERS: dict[float, str] = {
    sign * power: f"{'1 / ' * (sign < 0)}{what}{{}}" for sign in (1, -1) for power, what in _ROOTS.items()
}
"""Powers of a size that a factor may be, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guess:
    """A power of a size that a factor equals (an axis, "all ranks", "micro", "tokens of the step")."""

    id: str
    size: str
    power: int

    def factor(self, evidence: Evidence) -> float:
        """Factor in this case."""
        return float(_counts(evidence).get(self.size, 1)) ** self.power


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A factor that wrong tensors show: `relation` in words, `near` enough within this share, and what it predicts.

    `more` are sizes that it may be beside axes.
    """

    factor: float
    relation: str
    near: float
    predict: Predict
    more: tuple[str, ...] = ()


def factor_of(value: Tensor, truth: Tensor) -> float | None:
    """The number that the truth is multiplied by in `value`; None when no number explains it."""
    x, t = value.double(), truth.double()
    power = float((t * t).sum())
    factor = float((x * t).sum()) / power if power else 0.0
    return factor if factor and not is_count(x, t) and explains(factor * t, value, truth) else None


def sizes_of(evidence: Evidence, factor: float, near: float = _NEAR, more: tuple[str, ...] = ()) -> str:
    """Sizes of the case that make this factor in words, the fewest that fit; "" when it is none.

    Examples are "the root of tp=2", "dp=2 / micro=4".
    """
    known = [size for size in (*_sizes(evidence), "micro", "loss_scale", *more) if _counts(evidence)[size] > 1]
    powers = [(size, words, _counts(evidence)[size] ** power) for power, words in _POWERS.items() for size in known]
    alone = [(words.format(_label(evidence, size)), number) for size, words, number in powers]
    plain = [(words, number) for words, number in alone if " of " not in words]
    both = itertools.combinations(plain, 2)
    pairs = [(f"{a} x {b}".replace(" x 1 /", " /"), x * y) for (a, x), (b, y) in both if x * y != 1]
    for found, close in ((alone, near), (pairs, min(near, SINGLE))):  # so many pairs that one is near by chance
        if fitting := [label for label, other in found if _equal(abs(factor), other, close)]:
            return ("minus " if factor < 0 else "") + " or ".join(fitting[:2])
    return ""


def from_factor(evidence: Evidence, names: Sequence[str], beside: Sequence[str] = ()) -> list[Cause]:
    """Causes of one factor on all of these wrong tensors; nothing when they do not share one.

    `beside` are all wrong gradients, where they are to share it too.
    """
    every = [*names, *beside]
    values = {name: evidence.merged.tensors[name] for name in every if name in evidence.merged.tensors}
    known = [factor for n, value in values.items() if (factor := factor_of(value, evidence.truth[n])) is not None]
    near = max((share_left(value) for value in values.values()), default=_NEAR)
    if not known or len(known) < len(every):
        return []

    # guesses are of the measured factor, which is not exactly the size
    guesses = {name: known[0] * evidence.truth[name].double() for name in values}
    predicted = tuple(
        Explained(value=value, truth=evidence.truth[n], guess=guesses[n], names=(n,), fitted=int(n == names[0]))
        for n, value in values.items()
    )
    wrong = "it and all wrong gradients are" if beside else "it is" if len(names) == 1 else "all are"
    relation = f"{wrong} {times(known[0])} the truth"
    more = _DEPTH if kind_of(names[0]) == "init" else ()
    found = _Found(factor=known[0], relation=relation, near=near, predict=lambda _: predicted, more=more)
    return _decided(evidence, _guesses(evidence, names), found, lambda other: _factor_in(other, names[0]))


def meaning_of(
    evidence: Evidence,
    factor: float,
    relation: str,
    near: float,
    measure: Measure,
    predict: Predict,
    sizes: Sequence[str],
) -> list[Cause]:
    """Causes of a factor on part of a wrong tensor; `relation` states in words what the factor multiplies.

    `measure` finds the factor in another case. `sizes` are those that it may come from.
    """
    guesses = [_Guess(id=known, size=s, power=p) for s in sizes for known, p in _SUMS[:2]]
    return _decided(evidence, guesses, _Found(factor=factor, relation=relation, near=near, predict=predict), measure)


def every_size(evidence: Evidence) -> list[str]:
    """All axes that split something, all ranks, and the micro-batches."""
    return [*_sizes(evidence), "micro"]


def _factor_in(other: Evidence, name: str) -> float | None:
    """The factor on this tensor in another case; 1 where it is right."""
    value, truth = other.merged.tensors.get(name), other.truth.get(name)
    if value is None or truth is None or value.shape != truth.shape:
        return None
    error = float((value.double() - truth.double()).norm())
    return 1.0 if error <= SINGLE * float(truth.double().norm()) else factor_of(value, truth)


def _equal(one: float, other: float, near: float) -> bool:
    return abs(one - other) <= near * abs(other)


def _decided(evidence: Evidence, guesses: Sequence[_Guess], found: _Found, measure: Measure) -> list[Cause]:
    """Causes of the guesses that the factor fits here and in other cases; else a wrong sign or a constant factor."""
    factor, near = found.factor, found.near
    if independent(proof.truth for proof in found.predict(factor)) < FEWEST_OF_A_FACTOR:
        return []
    fitting = [g for g in guesses if _counts(evidence).get(g.size, 1) > 1 and _equal(g.factor(evidence), factor, near)]
    seen = [(other, there) for other in evidence.others if (there := measure(other)) is not None]
    wide = max(near, SINGLE)
    left = [g for g in fitting if all(_equal(there, g.factor(other), wide) for other, there in seen)]
    stays = all(_equal(there, factor, wide) for _, there in seen)
    if seen and stays and left:  # sizes that no legal case changes are left, and a constant fits as well
        large = [g for g in left if _counts(evidence)[g.size] >= _LARGE]
        alike = "" if large else UNDECIDED
        return _of_guesses(evidence, large or left, found, alike)
    if left:
        return _of_guesses(evidence, left, found, _shown(evidence, seen, {g.size for g in left}))
    if fitting and seen and not stays:
        return []
    if _equal(factor, -1, near):
        return claimed("sign", f"{found.relation}: the sign is wrong", *found.predict(-1.0))
    sizes = {g.size for g in fitting}
    sized = "" if seen else sizes_of(evidence, factor, near, found.more)
    words = f"{found.relation}{f', which is {sized}' if sized else ''}{_shown(evidence, seen, sizes)}"
    return claimed("constant_factor", words, *found.predict(factor), follows=tuple(sizes))


def _of_guesses(evidence: Evidence, left: Sequence[_Guess], found: _Found, shown: str) -> list[Cause]:
    """The first power of an axis that is left with all axes of that size, then numbers of micro-batches or tokens."""
    causes = []
    first = next((g for g in left if g.id != "constant_factor"), None)
    if first:
        alike = [g for g in left if (g.id, g.power) == (first.id, first.power)]
        causes.append((first, alike))
    counts = [g for g in left if g.id == "constant_factor"]
    causes += [(g, [g]) for g in counts[:1] if not (first and g.size == "tokens of the step")]
    follows = tuple(dict.fromkeys(g.size for g in left))
    meanings = ((g, f"{found.relation}, which is {_which(evidence, alike)}{shown}") for g, alike in causes)
    return [
        cause
        for g, words in meanings
        for cause in claimed(g.id, words, *found.predict(g.factor(evidence)), follows=follows)
    ]


def _which(evidence: Evidence, alike: Sequence[_Guess]) -> str:
    """The sizes that a factor is, in words: "tp=2 or dp=2", "1 / micro=4"."""
    return " or ".join(_POWERS[one.power].format(_label(evidence, one.size)) for one in alike)


def _shown(evidence: Evidence, seen: Sequence[tuple[Evidence, float]], sizes: set[str]) -> str:
    """The factor in other cases, in words: " (0.25 where tp=4)"."""
    here = _counts(evidence)
    elsewhere = [
        f"{there:.4g} where {_label(other, size)}"
        for other, there in seen
        for size in sorted(sizes)
        if _counts(other).get(size) != here.get(size)
    ]
    return f" ({', '.join(elsewhere)})" if elsewhere else ""


def _label(evidence: Evidence, size: str) -> str:
    return f"{size}={_counts(evidence).get(size, 1):g}"


def _guesses(evidence: Evidence, names: Sequence[str]) -> list[_Guess]:
    """Origins of a factor on these tensors: sums and means over axes, numbers of micro-batches and tokens."""
    sizes = _sizes(evidence)
    sums = [axis for axis in sizes if all(summable(evidence, axis, name) for name in names)]
    forward = kind_of(names[0]) in ("act", "logits", "init")
    found = [
        _Guess(id=known, size=size, power=power)
        for known, power in _SUMS
        for size in (sums if forward or power > 0 else sizes)
    ]
    for size in () if forward else ("micro", "tokens of the step"):
        found += [_Guess(id="constant_factor", size=size, power=power) for power in (1, -1)]
    return found


def _sizes(evidence: Evidence) -> list[str]:
    """Axes that split something, and all ranks where they are more than those of any axis."""
    sizes = split_axes(evidence.case)
    return [*sizes] if evidence.case.world_size in sizes.values() else [*sizes, "all ranks"]


def _counts(evidence: Evidence) -> dict[str, float]:
    """Every size that a factor may come from; axes that split nothing are not among them."""
    counts: dict[str, float] = {**split_axes(evidence.case), "all ranks": evidence.case.world_size}
    tokens = evidence.truth.get("tokens/0")
    counts |= {"micro": evidence.case.micro} | ({} if tokens is None else {"tokens of the step": float(tokens)})
    counts["loss_scale"] = float(getattr(evidence.case, "loss_scale", 1.0))
    counts[_DEPTH[0]] = 2.0 * getattr(evidence.case, "layers", 0)
    return counts


def _per_step(failure: Failure) -> list[Cause]:
    """Causes of a factor on the numbers of all wrong steps, else of one on the first step's and all wrong gradients.

    A constant factor that implies another whole number of tokens is left out: tokens may be counted otherwise.
    """
    evidence, names = failure.evidence, failure.alike
    gradients, first = failure.of_kind("grad"), evidence.merged.tensors.get(names[0])
    causes = from_factor(evidence, names)
    if not causes and gradients and names[0].endswith("/0"):  # gradients are those of the first step
        causes = from_factor(evidence, names[:1], gradients)
    if causes and causes[0].id == "constant_factor" and first is not None and "tokens" in evidence.shares:
        count = float(evidence.shares["tokens"].sum() * evidence.truth[names[0]].double() / first.double())
        causes = [] if math.isclose(count, round(count), rel_tol=1e-6) else causes
    return causes


_PER_STEP = frozenset({"loss", OF_TOKENS, "grad_norm"})
HYPOTHESES = (
    Hypothesis(
        predicts="all wrong tensors of a kind are the truth times one number",
        causes=of_values(from_factor),
        kinds=VALUES - _PER_STEP,
    ),
    Hypothesis(
        predicts="the first wrong tensor is the truth times a size of the case",
        causes=of_values(lambda evidence, names: [one for one in from_factor(evidence, names[:1]) if one.follows]),
        kinds=VALUES - _PER_STEP,
    ),
    Hypothesis(
        predicts="the number of every wrong step, or of one and all gradients, is the truth times one factor",
        causes=_per_step,
        kinds=_PER_STEP,
    ),
    Hypothesis(
        predicts="the number of tokens of every wrong step is the truth times a size of the case",
        causes=lambda failure: from_factor(failure.evidence, failure.of_kind("tokens")),
        kinds=frozenset({"tokens", OF_TOKENS}),
    ),
)
