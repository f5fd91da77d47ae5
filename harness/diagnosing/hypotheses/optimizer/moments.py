"""Errors of one step of Adam: of its moments, or, with right moments, of the update it makes of them.

With gradient g, moments m and v, and b for the share that each keeps of its past:

    m' = b1 m + (1 - b1) g      v' = b2 v + (1 - b2) g^2      p' = p - lr decay p - L m' / (sqrt(v') + e)

A wrong m' or v' is fitted by the right one and the one before: `value = x right + y before`. A gradient times f gives
`x = f, y = b (1 - f)`; moments that begin anew `x = 1, y = -b`. Another share b' gives `x = (1 - b') / (1 - b)` and `y
= b' - x b`. b1 and b2 are taken from the truth of the first step. Source: Kingma & Ba 2015; Loshchilov & Hutter 2019.
"""

import math
from collections.abc import Sequence

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.diagnosing.causes.cause import Cause, claimed
from shardproof.harness.diagnosing.causes.proofs import Explained
from shardproof.harness.diagnosing.causes.proofs import times as in_words
from shardproof.harness.diagnosing.hypotheses.factors import Predict
from shardproof.harness.diagnosing.hypotheses.optimizer.moved import Moved, fitted, moved, times

NEAR = 1e-4
"""Weights of a fit are equal within this."""
LEFT = 1e-2
"""A guess of another epsilon explains an update when it leaves less than this share of what is wrong."""
_KINDS = ("exp_avg", "exp_avg_sq")
_MEANS = {"exp_avg": "mean of gradients", "exp_avg_sq": "mean of squared gradients"}


def shares_kept(evidence: Evidence) -> tuple[float, float] | None:
    """(b1, b2) of the truth, from its first step; None when it does not show them."""
    gradients = (n for n in evidence.truth if kind_of(n) == "grad")
    shown = [n for n in gradients if n.replace("grad/", "exp_avg_sq_after/0/") in evidence.truth]
    name = max(shown, key=lambda n: float(evidence.truth[n].double().norm()), default="")
    if not name:
        return None
    largest, norm = getattr(evidence.case, "clip", 0.0), evidence.truth.get("grad_norm/0")
    clipped = min(1.0, largest / (float(norm) + 1e-6)) if largest and norm is not None else 1.0
    gradient = evidence.truth[name].double().flatten() * clipped
    found = []
    for kind, power in zip(_KINDS, (1, 2), strict=True):
        mean = evidence.truth[name.replace("grad/", f"{kind}_after/0/")].double().flatten()
        share = times(mean, gradient**power)
        if share is None:
            return None
        found.append(1 - share)
    return found[0], found[1]


def from_moments(evidence: Evidence, wrong: Sequence[str], step: int) -> list[Cause]:
    """Causes in the moments of this step other than a factor on the gradients."""
    kept = shares_kept(evidence)
    if kept is None:
        return []
    fits, betas = _fits(evidence, wrong, step), dict(zip(_KINDS, kept, strict=True))
    states = {kind: state for kind in fits if (state := moved(evidence, wrong, kind, step))}
    if fits and step and all(_near(x, 1) and _near(y, -betas[kind]) for kind, (x, y) in fits.items()):
        words = f"in step {step} the moments are those of its gradient alone"
        anew = (_sum(state, 1.0, -betas[kind]) for kind, state in states.items())
        return claimed("moments_reset", words, *anew)
    if fits and gradient_factor(evidence, wrong, step) is None:
        others = {kind: 1 - x * (1 - betas[kind]) for kind, (x, _) in fits.items()}
        agree = (not step or _near(y, others[kind] - x * betas[kind]) for kind, (x, y) in fits.items())
        if all(agree) and all(0 <= other < 1 for other in others.values()):
            betas_in_words = (
                f"the {_MEANS[kind]} keeps {b:.6g} of its past, not {betas[kind]:.6g}" for kind, b in others.items()
            )
            sums = (_sum(state, *fits[kind]) for kind, state in states.items())
            return claimed("other_beta", f"in step {step} {', '.join(betas_in_words)}", *sums)
    return _decay_in_gradient(moved(evidence, wrong, "exp_avg", step), step)


def _sum(state: Moved, x: float, y: float) -> Explained:
    """A moment that is x times the right one and y times the one before."""
    return Explained(
        value=state.value,
        truth=state.truth,
        guess=x * state.truth + y * state.before,
        left=LEFT,
        names=state.states,
        fitted=1,
    )


def of_gradients(evidence: Evidence, wrong: Sequence[str], step: int) -> Predict:
    """Prediction of moments whose gradients are multiplied by a factor."""
    kept, mean = shares_kept(evidence), moved(evidence, wrong, "exp_avg", step)
    return lambda factor: (_sum(mean, factor, kept[0] * (1 - factor)),) if kept and mean else ()


def gradient_factor(evidence: Evidence, wrong: Sequence[str], step: int) -> float | None:
    """The number that the gradients inside both moments are multiplied by; None when none explains them."""
    kept, mean = shares_kept(evidence), moved(evidence, wrong, "exp_avg", step)
    fit = fitted(mean.value, mean.truth, mean.before) if mean else None
    if kept is None or mean is None or fit is None:
        return None
    factor, past = fit
    square = moved(evidence, wrong, "exp_avg_sq", step)
    if step and bool(mean.before.any()) and not _near(past, kept[0] * (1 - factor)):
        return None
    if square is None:
        return factor if _near(factor, -1) else None
    other = fitted(square.value, square.truth, square.before)
    return factor if other and _near(other[0], factor**2) else None


def _fits(evidence: Evidence, wrong: Sequence[str], step: int) -> dict[str, tuple[float, float]]:
    """Kind of moment -> its weights, for those that are wrong; {} when one of them is no such sum."""
    found: dict[str, tuple[float, float]] = {}
    for kind in _KINDS:
        state = moved(evidence, wrong, kind, step)
        fit = fitted(state.value, state.truth, state.before) if state else None
        if state and fit is None:
            return {}
        if fit:
            found[kind] = fit
    return found


def _decay_in_gradient(mean: Moved | None, step: int) -> list[Cause]:
    """Whether the mean of gradients holds the parameters themselves."""
    parameters = mean.beside.get("parameter") if mean else None
    share = times(mean.value - mean.truth, parameters) if mean and parameters is not None else None
    if mean is None or parameters is None or share is None or share <= 0:
        return []
    words = f"the mean of gradients of step {step} holds {share:.3g} x the parameters"
    decayed = mean.truth + share * parameters
    return claimed(
        "decay_in_gradient",
        words,
        Explained(value=mean.value, truth=mean.truth, guess=decayed, left=LEFT, names=mean.states, fitted=1),
    )


def correction(evidence: Evidence, factor: float, step: int, predict: Predict) -> list[Cause]:
    """Whether a factor on what Adam makes of its moments is that of another number of steps, or of no correction."""
    kept = shares_kept(evidence)
    if kept is None:
        return []

    def size(first: float, second: float) -> float:
        return math.sqrt(second) / first

    (b1, b2), count = kept, step + 1
    now = size(1 - b1**count, 1 - b2**count)
    steps = (n for n in range(step + 3) if n != step)
    others = {f"the correction of step {n}": size(1 - b1 ** (n + 1), 1 - b2 ** (n + 1)) for n in steps}
    others |= {
        "no correction": 1.0,
        "the correction of the mean alone": 1 / (1 - b1**count),
        "the correction of the squares alone": math.sqrt(1 - b2**count),
    }
    for what, other in others.items():
        if math.isclose(factor, other / now, rel_tol=NEAR):
            words = f"what step {step} makes of its moments is {in_words(factor)} the right, as with {what}"
            return claimed("bias_correction", words, *predict(other / now))
    return []


def epsilon(evidence: Evidence, state: Moved, step: int) -> list[Cause]:
    """Whether updates of right moments are those of another epsilon."""
    kept, mean, square = shares_kept(evidence), state.beside.get("mean"), state.beside.get("square")
    if kept is None or mean is None or square is None:
        return []
    shown = square > 0  # rows that no token looked up have no moments
    mean, root, got, right, before = (x[shown] for x in (mean, square.sqrt(), state.got, state.right, state.before))
    large = root >= root.median()  # there any epsilon is next to nothing beside the root
    fit = fitted(-right[large], (mean / root)[large], before[large])
    if fit is None:
        return []
    size, decay = fit
    apart = got + decay * before
    guess = (-size * mean / apart - root)[apart != 0].median()
    again = -decay * before - size * mean / (root + guess)
    if not float(guess) > 0 or float((again - got).norm()) > LEFT * float((got - right).norm()):
        return []
    used = float(guess) / math.sqrt(1 - kept[1] ** (step + 1))
    words = f"the updates of step {step} are those of an epsilon of {used:.2g}"
    return claimed(
        "other_epsilon", words, Explained(value=got, truth=right, guess=again, left=LEFT, names=state.states, fitted=1)
    )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR * max(1.0, abs(other))
