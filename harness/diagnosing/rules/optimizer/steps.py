"""Errors of one step of the optimizer, where a subject returns its state after every step.

The truth of such a state is the dense model's step from the subject's own state before it: any error is this step's
alone. The error is in its moments (`moments` beside this file), or in the parameters' update. The update is fitted by
the right one and the parameters before: `got = x right + y before`. Tested on numbers, as everywhere.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of, step_of
from harness.diagnosing.rules.causes import Cause, claimed
from harness.diagnosing.rules.factors import Measure, Predict, every_size, meaning_of
from harness.diagnosing.rules.hypothesis import STATE, Hypothesis
from harness.diagnosing.rules.optimizer.clipped import by_block, by_element, by_square
from harness.diagnosing.rules.optimizer.moments import correction, epsilon, from_moments, gradient_factor, of_gradients
from harness.diagnosing.rules.optimizer.moved import Moved, before_step, fitted, moved, of_kind, times
from harness.diagnosing.rules.places import blocks_of
from harness.diagnosing.rules.proofs import Explained
from harness.diagnosing.rules.proofs import times as in_words
from harness.errors import ranks_text

CLOSE = 1e-4
"""A factor is that of clipping within this share of itself."""
LEFT = 1e-3
"""Share of what is wrong in a step that its cause may leave of it."""
LITTLE = 1e-2
"""An update by less than this share of the right one is next to nothing; more than this of the weights is no decay."""


def from_states(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """Causes in the first step with a wrong state or norm, from the parameters and moments of it that are wrong."""
    last = evidence.case.steps - 1
    step = last if kind_of(wrong[0]) == "param" else step_of(wrong[0])
    means = [moved(evidence, wrong, kind, step) for kind in ("exp_avg", "exp_avg_sq")]
    if mean := means[0] or means[1]:
        factor, measure = gradient_factor(evidence, wrong, step), partial(_of_gradients, mean.names)
        causes = _scaled(evidence, "gradients", step, factor, measure, of_gradients(evidence, wrong, step))
        causes = causes or from_moments(evidence, wrong, step)
        return causes or _not_zeroed(evidence, moved(evidence, wrong, "exp_avg", step), step)
    state, still = moved(evidence, wrong, "param", step), _still(evidence, wrong, step, last)
    if state is None:
        return still or by_block(evidence, wrong, step)
    return still or _updated(evidence, wrong, state, step)


def _updated(evidence: Evidence, wrong: Sequence[str], state: Moved, step: int) -> list[Cause]:
    """Causes of wrong updates when all that went into them is right."""
    factor, measure = times(state.got, state.right), partial(_of_updates, state.names)
    clips = "mean" not in state.beside  # right moments were made of right gradients
    causes = _scaled(evidence, "updates", step, factor, measure, lambda f: (_got(state, f * state.right),), clips=clips)
    causes = causes or _momentum(evidence, wrong, state, step) or _not_zeroed(evidence, state, step)
    fit = fitted(state.got, state.right, state.before)
    if not causes and fit is not None:
        causes = _decayed(evidence, state, step, *fit)
    return (
        causes or by_element(evidence, state, step) or by_block(evidence, wrong, step) or epsilon(evidence, state, step)
    )


def _got(state: Moved, guess: Tensor) -> Explained:
    """The updates that a cause predicts."""
    return Explained(value=state.got, truth=state.right, guess=guess, left=LEFT)


def _decayed(evidence: Evidence, state: Moved, step: int, factor: float, share: float) -> list[Cause]:
    """Causes of updates that are a factor times the right ones and a share of the parameters before."""
    if math.isclose(factor, 1, rel_tol=CLOSE):
        known = "decay_missing" if share > 0 else "decay_added"
        meaning = "weight decay is left out" if share > 0 else "weight decay that does not belong there"
        words = f"what is wrong in step {step} is {share:.3g} x the parameters themselves: {meaning}"
        decayed = _got(state, state.right + share * state.before)
        return claimed(known, words, decayed) if abs(share) < LITTLE else []
    if not 0 < share / (factor - 1) < LITTLE:  # the decay that is right already
        return []

    def predict(other: float) -> tuple[Explained]:
        return (_got(state, other * state.right + share * state.before),)

    causes = correction(evidence, factor, step, predict) if "mean" in state.beside else []
    clips, what = "mean" not in state.beside, "updates without their decay"
    return causes or _scaled(evidence, what, step, factor, lambda other: None, predict, clips=clips)


def _still(evidence: Evidence, wrong: Sequence[str], step: int, last: int) -> list[Cause]:
    """Parameters that stay where they were, all of them or some."""
    names = [(name, parameter) for name, parameter in of_kind(evidence, wrong, "param", step)]
    befores = {name: before_step(evidence, "param", step, parameter) for name, parameter in names}
    tensors = evidence.merged.tensors
    known = [(n, p) for n, p in names if n in tensors and befores[n] is not None]
    same = {n: before for n, _ in known if (before := befores[n]) is not None and torch.equal(tensors[n], before)}
    still = [p for n, p in known if n in same]
    stays = [Explained(value=tensors[n], truth=evidence.truth[n], guess=before) for n, before in same.items()]
    if not still:
        return _still_on_ranks(evidence, names, befores, step)
    if len(still) < len(known) or step == 0:
        named = "the parameters" if len(still) == len(known) else ", ".join(still[:3]) + " ..." * (len(still) > 3)
        return claimed("never_updated", f"{named}: as before step {step}", *stays)
    when = "the last step" if step == last else f"step {step}"
    words = f"the parameters are as before {when}: it was not taken, or came after they were read"
    return claimed("step_missing", words, *stays)


def _still_on_ranks(
    evidence: Evidence, names: Sequence[tuple[str, str]], befores: Mapping[str, Tensor | None], step: int
) -> list[Cause]:
    """Ranks on which every wrong parameter stays where it was, and nothing else is wrong anywhere."""
    stays, moves = dict[int, Explained](), set[int]()
    for name, _ in names:
        before, truth = befores[name], evidence.truth[name].double()
        for rank, blocks in blocks_of(evidence, name).items() if before is not None else ():
            for block in blocks:
                value, true = block.local.double(), block.part_of(truth)
                then = true if before is None else block.part_of(before.double())
                if torch.equal(value, then) and not torch.equal(then, true):
                    stays[rank] = Explained(value=value, truth=true, guess=then)
                elif float((value - true).norm()) <= CLOSE * float((true - then).norm()):
                    moves.add(rank)
                else:
                    return []
    if not stays or stays.keys() & moves:
        return []
    words = f"on rank{'s' * (len(stays) > 1)} {ranks_text(sorted(stays))} the parameters are as before step {step}"
    return claimed("never_updated", words, *stays.values())


def _scaled(
    evidence: Evidence,
    what: str,
    step: int,
    factor: float | None,
    measure: Measure,
    predict: Predict,
    *,
    clips: bool = True,
) -> list[Cause]:
    """Causes of one factor on all wrong updates or gradients of a step; `clips`: whether clipping may be behind it."""
    if factor is None:
        return []
    relation = f"the {what} of step {step} are {in_words(factor)} the right ones"
    largest, norm = getattr(evidence.case, "clip", 0.0) if clips else 0.0, evidence.truth.get(f"grad_norm/{step}")
    if largest and norm is not None and math.isclose(factor, max(1.0, float(norm) / largest), rel_tol=CLOSE):
        return claimed("unclipped", f"{relation}: they are not clipped", *predict(factor))
    if largest and norm is not None and factor > 1 and math.isclose(factor * float(norm), largest, rel_tol=CLOSE):
        return claimed("clip_scales_up", f"{relation}: a norm below the limit is scaled up to it", *predict(factor))
    if largest and (norm is None or float(norm) > largest or factor < 1):
        return by_square(evidence, factor, relation, step, predict)  # any other may come of another norm or limit
    sizes = [] if step else every_size(evidence)  # a sum or mean too many would show in every step
    causes = meaning_of(evidence, factor, relation, CLOSE, measure, predict, sizes)
    if 0 < factor < LITTLE and all(cause.id == "constant_factor" for cause in causes):
        return claimed("scaled_down", f"{relation}: divided once more before the step", *predict(factor))
    if what == "gradients":
        return causes
    rate = ", such as the learning rate"
    return [replace(one, words=one.words + rate * (one.id == "constant_factor" and not one.follows)) for one in causes]


def _of_gradients(names: Sequence[str], other: Evidence) -> float | None:
    """The factor on the gradients that the first step's moments of these parameters hold, in another case."""
    return gradient_factor(other, [f"{kind}_after/0/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names], 0)


def _of_updates(names: Sequence[str], other: Evidence) -> float | None:
    """The factor on what the first step moves these parameters by, in another case."""
    state = moved(other, [f"param/{name}" for name in names], "param", 0)
    if state is None:
        return None
    right = float((state.got - state.right).norm()) <= CLOSE * float(state.right.norm())
    return 1.0 if right else times(state.got, state.right)


def _momentum(evidence: Evidence, wrong: Sequence[str], state: Moved, step: int) -> list[Cause]:
    """Whether an update holds the one before, though the gradients of its step have the right norm."""
    last, norm = state.beside.get("last"), f"grad_norm/{step}"
    if last is None or "mean" in state.beside or norm not in evidence.merged.tensors or norm in wrong:
        return []
    share = times(state.got - state.right, last)
    if share is None or not 0 < share < 1:
        return []
    words = f"the updates of step {step} hold {share:.4g} x those of the step before: there is no momentum"
    return claimed("momentum_added", words, _got(state, state.right + share * last))


def _not_zeroed(evidence: Evidence, state: Moved | None, step: int) -> list[Cause]:
    """Whether a later step holds the first one's gradient too: which factor each parameter's has depends on what sums
    over ranks it went through again.
    """
    old = state.beside.get("gradient") if state and step else None
    if state is None or old is None:
        return []
    pairs = zip(state.apart(state.value - state.truth), state.apart(old), strict=True)
    shares = [(times(gap, gradient), gradient) for gap, gradient in pairs]
    again = [share * gradient for share, gradient in shares if share is not None]
    if len(again) < len(shares):
        return []
    words = f"step {step} holds the gradient of the first step once more: gradients are not set to zero in between"
    guess = state.truth + torch.cat(again)
    return claimed("not_zeroed", words, Explained(value=state.value, truth=state.truth, guess=guess, left=LEFT))


HYPOTHESES = (
    Hypothesis(
        predicts="the step with other gradients, moments, clipping or decay",
        causes=lambda failure: from_states(failure.evidence, failure.numbers),
        kinds=frozenset({"grad_norm", STATE}),
        speaks_of=lambda failure: failure.alike,
        fitted=1,
    ),
)
