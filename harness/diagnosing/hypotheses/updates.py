"""Wrong steps of an optimizer: not taken, made with old or scaled gradients, or with another tensor mixed in.

All wrong states of the first wrong step are examined together. If moments are wrong, nothing is said of the updates
made from them. A wrong moment or update is fitted as a sum of the right one and another tensor: the moment before, the
parameters, or the update before. If gradients are f times too large, the moment is f times the right one plus b (1 - f)
times the one before, where b is the share of the earlier moment that the optimizer keeps. For the mean of squares, f is
squared. Elements that Adam may have made from rounding (`Controls.adam_bound`) are left out. Source: Kingma & Ba 2015;
Loshchilov & Hutter 2019.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardproof.harness.checking.measures.kinds import kind_of, step_of
from shardproof.harness.checking.records import Evidence, RecordedRun, Truth
from shardproof.harness.diagnosing.causes.cause import Cause, claim_cause
from shardproof.harness.diagnosing.causes.hypothesis import LATER, STATE, Failure, Hypothesis
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.diagnosing.causes.proofs import FEWEST_OF_A_FACTOR, Explained, count_independent
from shardproof.harness.diagnosing.hypotheses.factors import meaning_of
from shardproof.harness.verdicts.facts import state_fact

NEAR = 1e-4
"""The weights of a fit are compared within this, and a fit leaves less than this share of the error."""
LEFT = 1e-2
"""The share of a step's error that its cause may leave."""
LOOSE = 1e-6
"""Elements are left out if Adam may have made more than this share of their movement from rounding."""
_OF_NORM = 1e-3
"""A factor is that of a norm within this share, since clipping adds a small number to the norm."""
_MOMENTS = {"exp_avg": "mean of gradients", "exp_avg_sq": "mean of squared gradients"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """All wrong tensors of a kind after one step, flat and end to end in float64.

    `states` are their names, `before` the values before the step. `beside` has two more tensors for the same elements,
    if known for all: the parameters before this step ("parameter"), and how they last moved ("last").
    """

    states: tuple[str, ...]
    value: Tensor
    truth: Tensor
    before: Tensor
    beside: Mapping[str, Tensor]

    @property
    def got(self) -> Tensor:
        """By how much the step moved them."""
        return self.value - self.before

    @property
    def right(self) -> Tensor:
        """By how much it should have."""
        return self.truth - self.before


def of_kind(run: RecordedRun, wrong: Sequence[str], kind: str, step: int) -> Iterator[tuple[str, str]]:
    """(name, parameter) of the wrong states of a kind after this step; after the last step parameters are named
    `param/`.
    """
    for name in wrong:
        if name.startswith(f"{kind}_after/{step}/"):
            yield name, name.split("/", 2)[2]
        elif name.startswith(f"{kind}/") and step == run.case.steps - 1:
            yield name, name.partition("/")[2]


def before_step(evidence: Evidence, kind: str, step: int, parameter: str) -> Tensor | None:
    """The full state of a parameter before this step; moments begin as zeros. None when it is not known."""
    if step:
        return evidence.run.tensors.get(f"{kind}_after/{step - 1}/{parameter}")
    start = evidence.search.shares.get(f"start/{parameter}", evidence.truth.initial.get(parameter))
    return start if kind == "param" or start is None else torch.zeros_like(start)


def find_moved_states(evidence: Evidence, wrong: Sequence[str], kind: str, step: int) -> Moved | None:
    """The wrong states of a kind after this step; None if there is none with a known state before it."""
    rows: list[dict[str, Tensor | None]] = []
    states = []
    for name, parameter in of_kind(evidence.run, wrong, kind, step):
        before, value = before_step(evidence, kind, step, parameter), evidence.run.tensors.get(name)
        if before is None or value is None:
            continue
        now = before_step(evidence, "param", step, parameter)
        earlier = before_step(evidence, "param", step - 1, parameter) if step else None
        last = None if now is None or earlier is None else now.double() - earlier.double()
        truth, slack = evidence.truth.tensors[name].double(), evidence.truth.controls.adam_bound.get(name)
        row = {"value": value, "truth": truth, "before": before, "parameter": now, "last": last}
        sure = ... if slack is None else slack.double() <= LOOSE * (truth - before.double()).abs()
        rows.append({part: None if t is None else t.double()[sure].flatten() for part, t in row.items()})
        states.append(name)
    if not states:
        return None
    known = [part for part in rows[0] if all(row[part] is not None for row in rows)]
    flat = {part: torch.cat([tensor for row in rows if (tensor := row[part]) is not None]) for part in known}
    value, truth, before = (flat.pop(part) for part in ("value", "truth", "before"))
    return Moved(states=tuple(states), value=value, truth=truth, before=before, beside=flat)


def find_multiple(value: Tensor, truth: Tensor) -> float | None:
    """The number by which `truth` is multiplied in `value`; None when no number explains it."""
    power = float(truth @ truth)
    factor = float(value @ truth) / power if power else 0.0
    error = min(float(value.norm()), float((value - truth).norm()))
    fits = factor and float((value - factor * truth).norm()) <= NEAR * error
    return factor if fits else None


def fit_linear(value: Tensor, truth: Tensor, other: Tensor) -> tuple[float, float] | None:
    """(a, b) with value = a truth + b other; b is 0 where `other` is. None when no such sum explains the value."""
    known = torch.stack([truth, other], 1) if bool(other.any()) else truth[:, None]
    error = float((value - truth).norm())
    few = count_independent([truth]) < FEWEST_OF_A_FACTOR
    if few or not error or not math.isfinite(error + float(known.norm())):
        return None
    sizes = known.norm(dim=0).clamp(min=1e-300)
    weights = torch.linalg.lstsq(known / sizes, value[:, None], driver="gelsd").solution[:, 0] / sizes
    explained = float((known @ weights - value).norm()) <= NEAR * error
    return (float(weights[0]), float(weights[1]) if len(weights) > 1 else 0.0) if explained else None


def _first_wrong_step(failure: Failure) -> int:
    """The first step with a wrong state or norm. If the first wrong tensor is `param/`, that is the last step."""
    if failure.kind != LATER and kind_of(failure.first) == "param":
        return failure.evidence.run.case.steps - 1
    return max(step_of(failure.first), 0)


def _find_wrong_states(failure: Failure, kind: str) -> Moved | None:
    return find_moved_states(failure.evidence, failure.numbers, kind, _first_wrong_step(failure))


def gradient_factor(evidence: Evidence, wrong: Sequence[str], step: int) -> float | None:
    """The number by which the gradients inside both moments are multiplied; None when none explains them."""
    moments = [find_moved_states(evidence, wrong, kind, step) for kind in _MOMENTS]
    fits = [fit_linear(one.value, one.truth, one.before) if one else None for one in moments]
    if moments[0] is None or fits[0] is None:
        return None
    factor, past = fits[0]
    if bool(moments[0].before.any()) and not (factor != 1 and 0 < past / (1 - factor) < 1):
        return None
    if moments[1] is None:
        return factor if math.isclose(factor, -1, rel_tol=NEAR) else None
    return factor if fits[1] and math.isclose(fits[1][0], factor**2, rel_tol=NEAR) else None


def _guess_moments(failure: Failure) -> list[Cause]:
    """Causes of wrong moments: gradients times one number, or earlier tensors mixed into the right moments."""
    step, evidence, wrong = _first_wrong_step(failure), failure.evidence, failure.numbers
    states = {kind: state for kind in _MOMENTS if (state := _find_wrong_states(failure, kind))}
    proofs, moments = list[Explained](), list[tuple[str, float, float]]()
    for kind, state in states.items():
        now = state.beside.get("parameter")
        fit = fit_linear(state.value, state.truth, state.before)
        share = None if fit or now is None or kind != "exp_avg" else find_multiple(state.value - state.truth, now)
        # Only for the mean of gradients: squares of gradients that include parameters are not linear in them.
        if share is not None and now is not None:
            proof = _explain_state(state, state.value, state.truth, state.truth + share * now)
            holds = state_fact("moment_with_parameters", step=step, moment=_MOMENTS[kind], share=share)
            return claim_cause("optimizer_state", holds, proof)
        if fit is None:
            return []
        moments.append((_MOMENTS[kind], *fit))
        guess = fit[0] * state.truth + fit[1] * state.before
        proofs.append(_explain_state(state, state.value, state.truth, guess))
    if not proofs:
        return []
    if (factor := gradient_factor(evidence, wrong, step)) is not None:
        if _follows_from_norm(failure, factor):
            return []
        names = [name.rpartition("/")[2] for name in next(iter(states.values())).states]
        first = [f"{kind}_after/0/{name}" for kind in _MOMENTS for name in names]
        measure = partial(gradient_factor, wrong=first, step=0)
        return meaning_of(evidence, factor, "gradients", NEAR, measure, lambda _: tuple(proofs), step)
    return claim_cause("optimizer_state", state_fact("other_moments", step=step, moments=moments), *proofs)


def _explain_state(state: Moved, value: Tensor, truth: Tensor, guess: Tensor, fitted: int = 1) -> Explained:
    return Explained(value=value, truth=truth, guess=guess, left=LEFT, names=state.states, fitted=fitted)


def _guess_updates(failure: Failure) -> list[Cause]:
    """Causes of wrong updates: updates times one number, or a share of the parameters or earlier updates added."""
    step, state = _first_wrong_step(failure), _find_wrong_states(failure, "param")
    if state is None or any(_find_wrong_states(failure, kind) for kind in _MOMENTS):
        return []
    if (factor := find_multiple(state.got, state.right)) is not None:
        if _follows_from_norm(failure, factor):
            return []
        proof = _explain_state(state, state.got, state.right, factor * state.right)
        measure = partial(_factor_of_updates, names=[name.rpartition("/")[2] for name in state.states])
        return meaning_of(failure.evidence, factor, "updates", NEAR, measure, lambda _: (proof,), step)
    last = state.beside.get("last") if _right_norm(failure) else None
    for what, other in (("the parameters before it", state.before), ("the updates before", last)):
        fit = None if other is None or not bool(other.any()) else fit_linear(state.got, state.right, other)
        if fit and other is not None:
            guess = fit[0] * state.right + fit[1] * other
            fact = state_fact("update_with", step=step, factor=fit[0], share=fit[1], beside=what)
            return claim_cause("optimizer_state", fact, _explain_state(state, state.got, state.right, guess, fitted=2))
    return []


def _right_norm(failure: Failure) -> bool:
    """Whether the norm of the step's gradients was returned and is right: then no gradient of another step is in it."""
    norm = f"grad_norm/{_first_wrong_step(failure)}"
    return norm in failure.evidence.run.tensors and norm not in failure.wrong


def _follows_from_norm(failure: Failure, factor: float) -> bool:
    """Whether gradients are clipped to this share of themselves because their norm is wrong by the same factor."""
    name = f"grad_norm/{_first_wrong_step(failure)}"
    value, true = failure.evidence.run.tensors.get(name), failure.evidence.truth.tensors.get(name)
    if value is None or true is None or name not in failure.wrong:
        return False
    return math.isclose(float(true), factor * float(value), rel_tol=_OF_NORM)


def _factor_of_updates(other: Evidence, names: Sequence[str]) -> float | None:
    """The factor on the movement of these parameters in the first step of another case."""
    state = find_moved_states(other, [f"param/{name}" for name in names], "param", 0)
    if state is None:
        return None
    right = float((state.got - state.right).norm()) <= NEAR * float(state.right.norm())
    return 1.0 if right else find_multiple(state.got, state.right)


def _not_taken(failure: Failure) -> list[Cause]:
    """Whether wrong parameters, or some of their values, are those from before the step, or before the first step."""
    evidence, step = failure.evidence, _first_wrong_step(failure)
    kind = "value" if kind_of(failure.first) == "value_after" else "param"
    names = list(of_kind(evidence.run, failure.numbers, kind, step))
    names = names or list(of_kind(evidence.run, failure.numbers, kind, evidence.run.case.steps - 1))
    tensors = evidence.run.tensors
    for first in dict.fromkeys((step, 0)) if not any(_find_wrong_states(failure, kind) for kind in _MOMENTS) else ():
        befores = {n: before_step(evidence, kind, first, parameter) for n, parameter in names}
        known = {n: then for n, then in befores.items() if then is not None}
        same = {
            n: then for n, then in known.items() if n in tensors and torch.equal(tensors[n].double(), then.double())
        }
        if same:
            some = () if len(same) == len(names) and kind == "param" else tuple(same)
            proofs = (
                Explained(value=tensors[n], truth=evidence.truth.tensors[n], guess=t, names=(n,))
                for n, t in same.items()
            )
            return claim_cause("never_updated", state_fact("as_before", names=some, step=first), *proofs)
        if known and (causes := _still_on_ranks(evidence.run, evidence.truth, known, first)):
            return causes
    return []


def _still_on_ranks(run: RecordedRun, truth: Truth, befores: Mapping[str, Tensor], step: int) -> list[Cause]:
    """Ranks on which every wrong parameter stays where it was, if nothing else is wrong anywhere."""
    stays, moves = dict[int, Explained](), set[int]()
    for name, before in befores.items():
        full = truth.tensors[name].double()
        for rank, blocks in blocks_of(run, name).items():
            for block in blocks:
                value, true, then = block.local.double(), block.part_of(full), block.part_of(before.double())
                if torch.equal(value, then) and not torch.equal(then, true):
                    stays[rank] = Explained(value=value, truth=true, guess=then, names=(name,))
                elif float((value - true).norm()) <= NEAR * float((true - then).norm()):
                    moves.add(rank)
                else:
                    return []
    if not stays or stays.keys() & moves:
        return []
    fact = state_fact("as_before_on", ranks=sorted(stays), step=step)
    return claim_cause("never_updated", fact, *stays.values())


def _not_zeroed(failure: Failure) -> list[Cause]:
    """A later step that still includes the first step's gradient, in its moments or otherwise in its parameters.

    Each parameter has a factor of its own, since the old gradient went once more through that parameter's sums over
    ranks.
    """
    evidence = failure.evidence
    step = _first_wrong_step(failure) if failure.kind != LATER else evidence.run.case.steps - 1
    kinds = (kind for kind in ("exp_avg", "param") if any(of_kind(evidence.run, failure.numbers, kind, step)))
    proofs = []
    for name, parameter in (
        of_kind(evidence.run, failure.numbers, next(kinds, ""), step) if step and not _right_norm(failure) else ()
    ):
        value, old = evidence.run.tensors.get(name), evidence.truth.tensors.get(f"grad/{parameter}")
        if value is None or old is None or count_independent([old]) < FEWEST_OF_A_FACTOR:
            return []
        truth = evidence.truth.tensors[name].double()
        share = find_multiple((value.double() - truth).flatten(), old.double().flatten())
        if share is None:
            return []
        guess = truth + share * old.double()
        proofs.append(Explained(value=value, truth=truth, guess=guess, left=LEFT, names=(name,), fitted=1))
    return claim_cause("not_zeroed", state_fact("first_gradient_again", step=step), *proofs)


_of_steps = partial(Hypothesis, kinds=frozenset({"grad_norm", STATE}))
_of_later = partial(Hypothesis, kinds=frozenset({"grad_norm", LATER, STATE}))
HYPOTHESES = (
    _of_later(predicts="parameters as they were before a step", causes=_not_taken),
    _of_later(predicts="a later step that holds the first gradients", causes=_not_zeroed),
    _of_steps(predicts="moments of scaled gradients, or other sums of the right moments", causes=_guess_moments),
    _of_steps(predicts="scaled updates, or with a share of parameters or of updates before", causes=_guess_updates),
)
