"""Hypotheses on a step of the optimizer: gradients, moments, clipping, decay, momentum, or a step that was not taken.

Where moments are wrong, their gradients or their rule are, and nothing is said of the updates made of them. All wrong
states of the step are looked at together.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import kind_of, step_of
from shardproof.harness.diagnosing.causes.cause import Cause, claimed
from shardproof.harness.diagnosing.causes.hypothesis import STATE, Failure, Hypothesis
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.diagnosing.causes.proofs import FEWEST_OF_A_FACTOR, Explained, independent
from shardproof.harness.diagnosing.causes.proofs import times as in_words
from shardproof.harness.diagnosing.hypotheses.factors import Measure, Predict, every_size, meaning_of
from shardproof.harness.diagnosing.hypotheses.optimizer.clipped import by_block, by_element, by_square
from shardproof.harness.diagnosing.hypotheses.optimizer.moments import (
    correction,
    epsilon,
    from_moments,
    gradient_factor,
    of_gradients,
)
from shardproof.harness.diagnosing.hypotheses.optimizer.moved import Moved, before_step, fitted, moved, of_kind, times
from shardproof.harness.errors import ranks_text

CLOSE = 1e-4
"""A factor is that of clipping within this share of itself."""
LEFT = 1e-3
"""Share of what is wrong in a step that its cause may leave of it."""
LITTLE = 1e-2
"""An update by less than this share of the right one is next to nothing; more than this of the weights is no decay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The first step with a wrong state or norm: its wrong parameters, else None where a moment is wrong."""

    evidence: Evidence
    wrong: Sequence[str]
    number: int
    mean: Moved | None
    state: Moved | None


def _step_of(failure: Failure) -> _Step:
    evidence, wrong = failure.evidence, failure.numbers
    number = evidence.case.steps - 1 if kind_of(failure.first) == "param" else step_of(failure.first)
    moments = (moved(evidence, wrong, kind, number) for kind in ("exp_avg", "exp_avg_sq"))
    mean = next((moment for moment in moments if moment), None)
    state = None if mean else moved(evidence, wrong, "param", number)
    return _Step(evidence=evidence, wrong=wrong, number=number, mean=mean, state=state)


def _gradients(step: _Step) -> list[Cause]:
    """Causes of one factor on the gradients inside the moments."""
    if step.mean is None:
        return []
    evidence, wrong, number = step.evidence, step.wrong, step.number
    factor, measure = gradient_factor(evidence, wrong, number), partial(_of_gradients, step.mean.names)
    return _scaled(evidence, "gradients", number, factor, measure, of_gradients(evidence, wrong, number))


def _moments(step: _Step) -> list[Cause]:
    """Other moments of right gradients."""
    return from_moments(step.evidence, step.wrong, step.number) if step.mean else []


def _updates(step: _Step) -> list[Cause]:
    """Causes of one factor on the updates."""
    state = step.state
    if state is None:
        return []
    factor, measure = times(state.got, state.right), partial(_of_updates, state.names)
    clips = "mean" not in state.beside  # right moments were made of right gradients

    def predict(other: float) -> tuple[Explained]:
        return (_got(state, other * state.right),)

    return _scaled(step.evidence, "updates", step.number, factor, measure, predict, clips=clips)


def _got(state: Moved, guess: Tensor, fitted: int = 1) -> Explained:
    """The updates that a cause predicts."""
    return Explained(value=state.got, truth=state.right, guess=guess, left=LEFT, names=state.states, fitted=fitted)


def _decayed(step: _Step) -> list[Cause]:
    """Updates that are a factor times the right ones and a share of the parameters before."""
    evidence, state, number = step.evidence, step.state, step.number
    fit = fitted(state.got, state.right, state.before) if state else None
    if state is None or fit is None:
        return []
    factor, share = fit
    if math.isclose(factor, 1, rel_tol=CLOSE):
        known = "decay_missing" if share > 0 else "decay_added"
        words = f"what is wrong in step {number} is {share:.3g} x the parameters before it"
        decayed = _got(state, state.right + share * state.before, fitted=2)
        return claimed(known, words, decayed) if abs(share) < LITTLE else []
    if not 0 < share / (factor - 1) < LITTLE:  # the decay that is right already
        return []

    def predict(other: float) -> tuple[Explained]:
        return (_got(state, other * state.right + share * state.before, fitted=2),)

    causes = correction(evidence, factor, number, predict) if "mean" in state.beside else []
    clips, what = "mean" not in state.beside, "updates without their decay"
    return causes or _scaled(evidence, what, number, factor, lambda other: None, predict, clips=clips)


def _not_taken(failed: _Step) -> list[Cause]:
    """Parameters that stay where they were, all of them or some."""
    if failed.mean:
        return []
    evidence, wrong, step, last = failed.evidence, failed.wrong, failed.number, failed.evidence.case.steps - 1
    names = [(name, parameter) for name, parameter in of_kind(evidence, wrong, "param", step)]
    befores = {name: before_step(evidence, "param", step, parameter) for name, parameter in names}
    tensors = evidence.merged.tensors
    known = [(n, p) for n, p in names if n in tensors and befores[n] is not None]
    same = {n: before for n, _ in known if (before := befores[n]) is not None and torch.equal(tensors[n], before)}
    still = [p for n, p in known if n in same]
    stays = [
        Explained(value=tensors[n], truth=evidence.truth[n], guess=before, names=(n,)) for n, before in same.items()
    ]
    if not still:
        return _still_on_ranks(evidence, names, befores, step)
    if len(still) < len(known) or step == 0:
        named = "the parameters" if len(still) == len(known) else ", ".join(still[:3]) + " ..." * (len(still) > 3)
        return claimed("never_updated", f"{named}: as before step {step}", *stays)
    when = "the last step" if step == last else f"step {step}"
    words = f"the parameters are as before {when}"
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
                    stays[rank] = Explained(value=value, truth=true, guess=then, names=(name,))
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
    if factor is None or independent(proof.truth for proof in predict(factor)) < FEWEST_OF_A_FACTOR:
        return []
    relation = f"the {what} of step {step} are {in_words(factor)} the right ones"
    largest, norm = getattr(evidence.case, "clip", 0.0) if clips else 0.0, evidence.truth.get(f"grad_norm/{step}")
    if largest and norm is not None and math.isclose(factor, max(1.0, float(norm) / largest), rel_tol=CLOSE):
        return claimed("unclipped", f"{relation}, as if they were not clipped", *predict(factor))
    if largest and norm is not None and factor > 1 and math.isclose(factor * float(norm), largest, rel_tol=CLOSE):
        return claimed("clip_scales_up", f"{relation}, as if scaled up to clip={largest:g}", *predict(factor))
    if largest and (norm is None or float(norm) > largest or factor < 1):
        return by_square(evidence, factor, relation, step, predict)  # any other may come of another norm or limit
    sizes = [] if step else every_size(evidence)  # a sum or mean too many would show in every step
    causes = meaning_of(evidence, factor, relation, CLOSE, measure, predict, sizes)
    if 0 < factor < LITTLE and all(cause.id == "constant_factor" for cause in causes):
        return claimed("scaled_down", relation, *predict(factor))
    return causes


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


def _momentum(failed: _Step) -> list[Cause]:
    """An update that holds the one before, though the gradients of its step have the right norm."""
    state, step, norm = failed.state, failed.number, f"grad_norm/{failed.number}"
    last = state.beside.get("last") if state and "mean" not in state.beside else None
    if state is None or last is None or norm not in failed.evidence.merged.tensors or norm in failed.wrong:
        return []
    share = times(state.got - state.right, last)
    if share is None or not 0 < share < 1:
        return []
    words = f"the updates of step {step} hold {share:.4g} x those of the step before"
    return claimed("momentum_added", words, _got(state, state.right + share * last))


def _not_zeroed(failed: _Step) -> list[Cause]:
    """A later step that holds the first one's gradient too.

    Which factor each parameter's has depends on what sums over ranks it went through again.
    """
    step = failed.number
    state = moved(failed.evidence, failed.wrong, "exp_avg", step) if failed.mean else failed.state
    old = state.beside.get("gradient") if state and step else None
    if state is None or old is None:
        return []
    pairs = zip(state.apart(state.value - state.truth), state.apart(old), strict=True)
    shares = [(times(gap, gradient), gradient) for gap, gradient in pairs]
    again = [share * gradient for share, gradient in shares if share is not None]
    if len(again) < len(shares):
        return []
    words = f"step {step} holds the gradient of the first step once more"
    guess = state.truth + torch.cat(again)
    value, truth = state.value, state.truth
    again_in_it = Explained(value=value, truth=truth, guess=guess, left=LEFT, names=state.states, fitted=len(again))
    return claimed("not_zeroed", words, again_in_it)


def _of_step(find: Callable[[_Step], list[Cause]]) -> Callable[[Failure], list[Cause]]:
    return lambda failure: find(_step_of(failure))


def _clipped_by_block(step: _Step) -> list[Cause]:
    return [] if step.mean else by_block(step.evidence, step.wrong, step.number)


def _clipped_by_element(step: _Step) -> list[Cause]:
    return by_element(step.evidence, step.state, step.number) if step.state else []


def _other_epsilon(step: _Step) -> list[Cause]:
    return epsilon(step.evidence, step.state, step.number) if step.state else []


_of_steps = partial(Hypothesis, kinds=frozenset({"grad_norm", STATE}))
HYPOTHESES = (
    _of_steps(predicts="parameters as they were before the step", causes=_of_step(_not_taken)),
    _of_steps(predicts="moments of gradients times one number", causes=_of_step(_gradients)),
    _of_steps(
        predicts="moments that begin anew, keep another share of their past, or hold decay", causes=_of_step(_moments)
    ),
    _of_steps(predicts="updates times one number", causes=_of_step(_updates)),
    _of_steps(predicts="updates that hold the ones before", causes=_of_step(_momentum)),
    _of_steps(predicts="a later step that holds the first gradients", causes=_of_step(_not_zeroed)),
    _of_steps(predicts="updates with another share of the parameters", causes=_of_step(_decayed)),
    _of_steps(predicts="updates of which no element exceeds a limit", causes=_of_step(_clipped_by_element)),
    _of_steps(predicts="a factor of its own for each part that moves", causes=_of_step(_clipped_by_block)),
    _of_steps(predicts="updates by another epsilon", causes=_of_step(_other_epsilon)),
)
