"""Wrong tensors that are the truth times one number, and which sizes of the case that number may come from.

A sum over an axis is named only if such a sum can happen to this very tensor (`is_summable`). If several sizes of the
case equal the factor, or a constant may, `Search.others` decides: the same subject in cases with another size. A factor
that changes with the size comes from it, and a factor that stays is a constant. Without such cases all sizes that fit
are named, since the numbers of one case cannot choose between them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.records import Claims, Evidence, RecordedRun, Truth
from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause
from shardproof.harness.diagnosing.causes.hypothesis import OF_TOKENS, STATE, VALUES, Failure, Hypothesis, of_values
from shardproof.harness.diagnosing.causes.places import is_summable
from shardproof.harness.diagnosing.causes.proofs import (
    FEWEST_OF_A_FACTOR,
    SINGLE,
    Explained,
    count_independent,
    is_explained_by,
    share_left,
)
from shardproof.harness.diagnosing.hypotheses.patterns import is_count
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.verdicts.facts import state_fact

Predict = Callable[[float], tuple[Explained, ...]]
"""What a factor predicts: factor -> predictions for the wrong tensors."""
Measure = Callable[[Evidence], float | None]
"""Evidence of another case -> the factor of the same tensor or part in that case; None if it shows none."""
_NEAR = 1e-6
"""A factor equals a size within this share, or within what rounding leaves of the error."""
_LARGE = 3
"""A factor that equals a size of at least this is not taken for a constant."""
_ALL, _TOKENS = "all ranks", "tokens of the step"
_POWERS = (1, -1, 2, -2)
"""The powers of a size that a factor may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guess:
    """A size, or a power of it, that a factor equals: of an axis, of all ranks, micro-batches, tokens of the step."""

    size: str
    power: int

    def factor(self, evidence: Evidence) -> float:
        """Factor in this case."""
        return _counts_by_name(evidence.run, evidence.truth).get(self.size, 1.0) ** self.power


def factor_of(value: Tensor, truth: Tensor) -> float | None:
    """The number by which the truth is multiplied in `value`; None when no number explains it."""
    x, t = value.double(), truth.double()
    power = float((t * t).sum())
    factor = float((x * t).sum()) / power if power else 0.0
    return factor if factor and not is_count(x, t) and is_explained_by(factor * t, value, truth) else None


def from_factor(evidence: Evidence, names: Sequence[str], beside: Sequence[str] = ()) -> list[Cause]:
    """Causes of one factor on all of these wrong tensors; empty when they do not share one.

    `beside`: all wrong gradients, if they must have the same factor.
    """
    every = [*names, *beside]
    values = {name: evidence.run.tensors[name] for name in every if name in evidence.run.tensors}
    known = [
        factor for n, value in values.items() if (factor := factor_of(value, evidence.truth.tensors[n])) is not None
    ]
    if not known or len(known) < len(every):
        return []
    near = max(_NEAR, *(share_left(value) for value in values.values()))
    # the measured factor is not exactly a size, but the guesses are
    predicted = tuple(
        Explained(
            value=value,
            truth=evidence.truth.tensors[name],
            guess=known[0] * evidence.truth.tensors[name].double(),
            names=(name,),
            fitted=int(name == names[0]),
        )
        for name, value in values.items()
    )
    what = "it and gradients" if beside else "it" if len(names) == 1 else "all"
    guesses = _guess_origins(evidence.run, evidence.claims, names)
    measure: Measure = lambda other: _factor_in(other.run, other.truth, names[0])  # noqa: E731
    return _decide_factor(evidence, guesses, known[0], {"what": what}, near, measure, lambda _: predicted)


def meaning_of(
    evidence: Evidence, factor: float, what: str, near: float, measure: Measure, predict: Predict, step: int
) -> list[Cause]:
    """Causes of a factor on the result of a step; `what` is "gradients" or "updates".

    `measure` finds the factor in another case. In later steps no size is a possible cause: it would show in step 0.
    """
    sizes = () if step else (*_sizes_that_split(evidence.run), "micro")
    guesses = [_Guess(size=size, power=power) for size in sizes for power in (1, -1)]
    return _decide_factor(evidence, guesses, factor, {"what": what, "step": step}, near, measure, predict)


def _factor_in(run: RecordedRun, truth: Truth, name: str) -> float | None:
    """The factor on this tensor in another case; 1 if it is right there."""
    value, true = run.tensors.get(name), truth.tensors.get(name)
    if value is None or true is None or value.shape != true.shape:
        return None
    error = float((value.double() - true.double()).norm())
    return 1.0 if error <= SINGLE * float(true.double().norm()) else factor_of(value, true)


def _is_equal(one: float, other: float, near: float) -> bool:
    return abs(one - other) <= near * abs(other)


def _decide_factor(
    evidence: Evidence,
    guesses: Sequence[_Guess],
    factor: float,
    multiplied: Mapping[str, str | int],
    near: float,
    measure: Measure,
    predict: Predict,
) -> list[Cause]:
    """The causes for the sizes that equal the factor here and in other cases; otherwise that of a constant factor.

    `multiplied`: values of the fact that say what is multiplied.
    """
    if count_independent(proof.truth for proof in predict(factor)) < FEWEST_OF_A_FACTOR:
        return []
    counts = _counts_by_name(evidence.run, evidence.truth)
    fitting = [g for g in guesses if counts.get(g.size, 1) > 1 and _is_equal(g.factor(evidence), factor, near)]
    seen = [(other, there) for other in evidence.search.others if (there := measure(other)) is not None]
    wide = max(near, SINGLE)
    left = [g for g in fitting if _follows_size(evidence, g, seen, wide)]
    stays = all(_is_equal(there, factor, wide) for _, there in seen)
    follows = tuple(dict.fromkeys(g.size for g in left or fitting))
    elsewhere = [
        (there, _label_of_size(other.run, other.truth, size))
        for other, there in seen
        for size in follows
        if _counts_by_name(other.run, other.truth).get(size) != counts.get(size)
    ]
    stated = partial(state_fact, "factor", **multiplied, factor=factor)
    if seen and stays and left:  # no legal case changes these sizes, so a constant fits as well
        large = [g for g in left if counts[g.size] >= _LARGE]
        left, elsewhere = large or left, []
        stated = partial(stated, unsure=not large)
    if left:
        sizes = [(_label_of_size(evidence.run, evidence.truth, g.size), g.power) for g in left]
        fact = stated(sizes=sizes, elsewhere=elsewhere)
        return claim_cause("size_factor", fact, *predict(factor), follows=follows)
    if fitting and seen and not _is_constant(factor, [there for _, there in seen], wide):
        return []
    return claim_cause("constant_factor", stated(elsewhere=elsewhere), *predict(factor), follows=follows)


def _is_constant(factor: float, elsewhere: Sequence[float], near: float) -> bool:
    """Whether this is the factor in all other cases in which the tensor is wrong."""
    found = [there for there in elsewhere if there != 1]
    return bool(found) and all(_is_equal(there, factor, near) for there in found)


def _follows_size(evidence: Evidence, guess: _Guess, seen: Sequence[tuple[Evidence, float]], near: float) -> bool:
    """Whether the factor is the guess in other cases, both those with another size and those with the same size.

    The tensor may also be right in a case with the same size, since the mistake may need another size that is gone.
    """
    size = _counts_by_name(evidence.run, evidence.truth).get(guess.size)
    fits = [(other, there, _is_equal(there, guess.factor(other), near)) for other, there in seen]
    alike = [_counts_by_name(other.run, other.truth).get(guess.size) == size for other, _, _ in fits]
    shown = any(fit and there != 1 and not same for (_, there, fit), same in zip(fits, alike, strict=True))
    return all(fit or (shown and same and there == 1) for (_, there, fit), same in zip(fits, alike, strict=True))


def _label_of_size(run: RecordedRun, truth: Truth, size: str) -> str:
    return f"{size}={_counts_by_name(run, truth).get(size, 1):g}"


def _guess_origins(run: RecordedRun, claims: Claims, names: Sequence[str]) -> list[_Guess]:
    """Possible origins of a factor on these tensors: sums and means over axes, numbers of micro-batches and tokens."""
    sizes = _sizes_that_split(run)
    sums = [axis for axis in sizes if all(is_summable(run, claims, axis, name) for name in names)]
    forward = kind_of(names[0]) in ("act", "logits", "init")
    found = [_Guess(size=s, power=power) for power in _POWERS for s in (sums if forward or power > 0 else sizes)]
    both = () if forward else ("micro", _TOKENS)
    return [*found, *(_Guess(size=size, power=power) for size in both for power in (1, -1))]


def _sizes_that_split(run: RecordedRun) -> list[str]:
    """The axes that split something, and all ranks if they are more than those of any axis."""
    sizes = split_axes(run.case)
    return [*sizes] if run.case.world_size in sizes.values() else [*sizes, _ALL]


def _counts_by_name(run: RecordedRun, truth: Truth) -> dict[str, float]:
    """Every size that a factor may come from, except axes that split nothing."""
    counts: dict[str, float] = {**split_axes(run.case), _ALL: run.case.world_size}
    tokens = truth.tensors.get("tokens/0")
    return counts | {"micro": run.case.micro} | ({} if tokens is None else {_TOKENS: float(tokens)})


def _per_step(failure: Failure) -> list[Cause]:
    """Causes of a factor on the numbers of all wrong steps, else on that of the first step and all wrong gradients.

    A constant factor that implies another whole number of tokens is left out: tokens may be counted differently.
    """
    evidence, names = failure.evidence, failure.alike
    gradients, first = failure.of_kind("grad"), evidence.run.tensors.get(names[0])
    causes = from_factor(evidence, names)
    if not causes and gradients and names[0].endswith("/0"):  # gradients are those of the first step
        causes = from_factor(evidence, names[:1], gradients)
    if causes and causes[0].id == "constant_factor" and first is not None and "tokens" in evidence.search.shares:
        count = float(
            evidence.search.shares["tokens"].sum() * evidence.truth.tensors[names[0]].double() / first.double()
        )
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
        predicts="the first wrong state is the truth times one number",
        causes=of_values(from_factor),
        kinds=frozenset({STATE}),
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
