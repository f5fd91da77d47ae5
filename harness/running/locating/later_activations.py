"""The activations of the micro-batch in which a failed case first goes wrong, if that is not the first one.

Activations are captured in the first micro-batch of the first step. A feature that keeps something from one micro-batch
or step to the next is still right there. So ranks and dense model run once more, and the evidence gets the activations
of a later micro-batch in place of the first one's. That evidence is used for the explanation alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor

from shardproof.harness.checking.checks import CHECKS, run_checks
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of, step_of
from shardproof.harness.checking.measures.tolerance import FLOAT64_CEILING
from shardproof.harness.checking.records import Evidence, merged_outcomes
from shardproof.harness.diagnosing.causes.before_sums import find_summed_axes
from shardproof.harness.diagnosing.causes.places import update_in_doubt
from shardproof.harness.diagnosing.first_place import has_right_parameters
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.running.truth.own import EXACT
from shardproof.harness.verdicts.verdict import FAIL

CHECK = "later activations"
"""The name of the finding about these activations, which no check makes."""
_COMPARED = {name: CHECKS[name] for name in ("replicas", "activations", "activation_gradients")}
_MOST = 3
"""The most micro-batches that are tried."""

Place = tuple[int, int]
"""Step and micro-batch."""


def with_later_activations(
    trial: Trial, evidence: Evidence, findings: Mapping[str, Finding], wrong: Sequence[str]
) -> tuple[Evidence, Mapping[str, Finding]]:
    """The evidence with the activations of the first micro-batch in which one is wrong, and a finding that names these.

    Unchanged if the first micro-batch has a wrong activation, if no later one that is tried has, if the subject does
    not say how its activations lie, or if it has a truth of its own. Also unchanged in dtypes other than float64, which
    would need control runs.
    """
    activations = any(map(_is_activation, evidence.run.returned))
    if trial.reference.model is None or not activations or trial.case.dtype != EXACT or evidence.truth.unmergeable:
        return evidence, findings
    for place in islice(_find_later_places(evidence, wrong), _MOST):
        if not trial.has_time("located"):
            break
        try:
            with trial.time_part("located"):
                seen = _observe_place(trial, evidence, place)
                names = _find_wrong_activations(seen)
        except Exception:  # the verdict stands with a less exact place
            break
        if names:
            return seen, {**findings, CHECK: Finding(verdict=FAIL, facts=(), names=names)}
    return evidence, findings


def _find_later_places(evidence: Evidence, wrong: Sequence[str]) -> Iterator[Place]:
    """The micro-batches in which the first wrong tensor may have gone wrong, without the first of all."""
    first = next(iter(wrong), "")
    kind, step, case = kind_of(first), max(step_of(first), 0), evidence.run.case
    places = [(step, micro) for micro in range(case.micro) if (step, micro) != (0, 0)]
    if any(map(_is_activation, wrong)) or not _has_right_parameters_before(evidence, first, wrong):
        return
    if kind == "logits":
        off = _find_wrong_micro_batches(evidence, first)
        places = [place for place in places if not off or place[1] in off]
    elif kind == "loss":
        places = places if f"logits/{step}" not in evidence.run.returned else []
    elif kind == "grad":  # no micro-batch explains a gradient on which ranks disagree
        known = first not in evidence.run.tensors or find_summed_axes(evidence, first, wrong) is not None
        places = [] if known else places
    elif kind != "grad_norm" or not step:  # gradients of later steps are not returned
        places = []
    yield from places


def _find_wrong_micro_batches(evidence: Evidence, name: str) -> set[int]:
    """The micro-batches with wrong logits, whose rows are ordered by data rank, then micro-batch; empty if unknown."""
    value, true, case = evidence.run.tensors.get(name), evidence.truth.tensors.get(name), evidence.run.case
    parts = case.micro * getattr(case, "dp", 1)
    if value is None or true is None or value.shape != true.shape or not true.dim() or len(true) % parts:
        return set()
    gaps = (value.double() - true.double()).abs().unflatten(0, (-1, case.micro, len(true) // parts)).flatten(2)
    off = ~(gaps.amax((0, 2)) <= FLOAT64_CEILING * float(true.double().abs().max()))  # NaN is wrong
    return {*off.nonzero().flatten().tolist()}


def _has_right_parameters_before(evidence: Evidence, first: str, wrong: Sequence[str]) -> bool:
    """Whether the step of the first wrong name begins with right parameters, as far as is known."""
    if update_in_doubt(evidence.run, evidence.truth, first, wrong, tried=True) < 0:
        return True
    earlier = evidence.search.earlier
    return earlier is not None and has_right_parameters(earlier[0].run, earlier[1])


def _observe_place(trial: Trial, evidence: Evidence, place: Place) -> Evidence:
    """The evidence with the activations of this step and micro-batch, of the ranks and of the dense model."""
    model, run, truth = trial.reference.model, evidence.run, evidence.truth
    assert model is not None  # only our decoder can capture these
    again = trial.run(trial.subject.call, name=trial.subject.address, watch=True, observed=place)
    true, control = (
        trial.compute_anew(function, part="located", states=truth.controls.states, observed=place)
        for function in (model.truth, model.control)
    )
    tensors = {
        name: true.get(name, tensor) if _is_activation(name) else tensor for name, tensor in truth.tensors.items()
    }
    runs = [_without_activations(one) for one in truth.controls.runs] or [{}]
    runs[0] |= {name: tensor for name, tensor in control.items() if _is_activation(name)}
    merged = merged_outcomes(run.outcomes, again.captured, tensors, _without_activations(run.tensors))
    return replace(
        evidence,
        run=replace(run, merged=merged, captured=again.captured),
        truth=replace(truth, tensors=tensors, controls=replace(truth.controls, runs=tuple(runs))),
    ).with_found(observed=place)


def _is_activation(name: str) -> bool:
    return kind_of(name) in ("act", "act_grad")


def _without_activations(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not _is_activation(name)}


def _find_wrong_activations(evidence: Evidence) -> tuple[str, ...]:
    """The activations and their gradients that are wrong, or on which ranks disagree."""
    findings = run_checks(evidence, _COMPARED).values()
    names = [name for finding in findings if finding.verdict == FAIL for name in finding.names]
    return tuple(dict.fromkeys(filter(_is_activation, names)))
