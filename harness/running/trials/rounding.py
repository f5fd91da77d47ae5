"""Limits of rounding: control runs, steps from the subject's own states, Adam's slack.

Each function adds to the evidence of a run what limits are made of (harness.checking.measures.tolerance); none
of them judges.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import is_state, kind_of, step_of
from shardproof.harness.checking.measures.measured import Measured
from shardproof.harness.checking.measures.tolerance import FLOAT64_CEILING, Controlled
from shardproof.harness.checking.measuring import compared, movement, sizes_of
from shardproof.harness.running.trials.reference import Function
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.running.truth.control_modes import AMPLIFIED
from shardproof.harness.torch_internals.autograd import give_back

MORE_PARTS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Into how many partial sums the further control runs cut their sums; 1 adds the micro-batches in reverse only."""
FURTHER_PARTS = (10, 12, 14)
"""The same for errors of at most NEAR limits; with an even number the decoder takes torch's fused attention."""
NEAR = 3.0
"""Errors in units of their limit up to which that limit may have come from control runs that were all lucky."""
_OF_PARAMETERS = ("grad", "param")
"""Kinds of names whose tensors have the shapes of parameters."""
_LARGE = 2**20
"""Elements of a tensor that is not kept of every control run."""


def stepwise(trial: Trial, evidence: Evidence) -> Evidence:
    """Evidence with every step of the truth begun at the subject's own state before it, where all were returned.

    Adam's slack of rounding in one step is added too. Else the evidence stays. In lower precision with a first control
    run too, one step at a time where the truth is.
    """
    names = trial.reference
    if evidence.states is not None:
        return evidence
    states = _states(trial, evidence) if names.model else None
    controls = (_stepped(trial, names.control, states),) if evidence.dtype != "float64" else ()
    if states is None:
        return replace(evidence, controls=controls, far={})
    truth = trial.computed(names.truth, states=states) if states else trial.dense(names.truth)
    known = {name: truth.get(name, tensor) for name, tensor in evidence.truth.items()}
    stepped = replace(evidence, truth=known, controls=controls, far={}, states=states)
    return replace(stepped, slack=_slack(trial, states, truth, controls))


def _states(trial: Trial, evidence: Evidence) -> dict[str, Tensor] | None:
    """The subject's states after all steps but the last, {} where there is one step; None when one is missing."""
    steps = trial.case.steps
    before = [n for n in trial.dense(trial.reference.truth) if is_state(n) and step_of(n) < steps - 1]
    if steps > 1 and (not before or any(name not in evidence.merged.tensors for name in before)):
        return None
    return {name: evidence.merged.tensors[name] for name in before}


def _slack(
    trial: Trial, states: Mapping[str, Tensor], truth: Mapping[str, Tensor], controls: Sequence[Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    model = trial.reference.model
    with trial.timed("control"):
        return model.adam_slack(trial.case, states, truth, controls) if model else {}


def doubtful(trial: Trial, evidence: Evidence, wrong: Collection[Measured]) -> bool:
    """Whether rounding may explain something that is wrong, or all of it where only the verdict counts.

    In float64 only errors that are as small as noise can be.
    """
    doubts = [evidence.dtype != "float64" or measured.error < FLOAT64_CEILING for measured in wrong]
    return bool(doubts) and (all(doubts) if trial.verdict_alone else any(doubts))


def controlled(trial: Trial, evidence: Evidence, wrong: Collection[Measured]) -> Evidence:
    """Evidence with MORE_PARTS control runs more, for one may be lucky, and what a relu's kink may change.

    Of large tensors there are only as many as it takes until nothing of this is wrong: each costs as much as the ranks.
    Where something is still just beyond its limit, all of them may have been lucky, and there are FURTHER_PARTS. Then
    a choice may have fallen otherwise, so a truth of the subject's own is AMPLIFIED. Choices of our dense
    model are bounded by kinks and slack.
    """
    names, states, truth = trial.reference, evidence.states, evidence.truth
    for parts in MORE_PARTS:
        evidence = _with_control_run(trial, evidence, parts)
        if evidence.far and _furthest(evidence, wrong) <= 1:
            break
    for parts in FURTHER_PARTS:
        if not 1 < _furthest(evidence, wrong) <= NEAR:
            break
        evidence = _with_control_run(trial, evidence, parts)
    if names.own is not None and _furthest(evidence, wrong) > 1:
        runs = (trial.dense(names.control, part="control", parts=parts) for parts in AMPLIFIED)
        evidence = replace(evidence, amplified=tuple(runs))
    model = names.model
    kinks = tuple(_stepped(trial, model.kinks, states, side=side) for side in (1, -1)) if model else ()
    slack = {} if states is None else _slack(trial, states, {**trial.dense(names.truth), **truth}, evidence.controls)
    return replace(evidence, kinks=kinks, slack=slack)


def _with_control_run(trial: Trial, evidence: Evidence, parts: int) -> Evidence:
    give_back(evidence.truth.values())
    controls = *evidence.controls, _stepped(trial, trial.reference.control, evidence.states, parts=parts)
    return measured_apart(trial, replace(evidence, controls=controls))


def _furthest(evidence: Evidence, wrong: Collection[Measured]) -> float:
    """The largest error of what was wrong, in units of what the control runs allow by now."""
    kinds = {kind_of(measured.name) for measured in wrong}
    rms = sizes_of(evidence, [name for name in evidence.truth if kind_of(name) in kinds])
    return max((compared(evidence, one.name, rms.get(kind_of(one.name), 0.0)).ratio for one in wrong), default=0.0)


def measured_apart(trial: Trial, evidence: Evidence) -> Evidence:
    """Evidence without the large tensors of its control runs: of them only how far they are from the truth.

    As it is where other groupings are held against control runs too.
    """
    tensors = [pair for run in evidence.controls for pair in run.items() if kind_of(pair[0]) in _OF_PARAMETERS]
    names = {name for name, tensor in tensors if tensor.numel() > _LARGE and tensor.is_floating_point()}
    if not names or trial.reference.own:
        return evidence
    truth, far = evidence.truth, dict(evidence.far)
    kinds = {} if far else sizes_of(evidence, [name for name in truth if kind_of(name) in _OF_PARAMETERS])
    for name in names & truth.keys():
        moved = movement(evidence, name)
        true, runs = truth[name], [run[name] for run in evidence.controls if name in run]
        if moved is not None:
            true, runs = moved.truth, list(moved.controls)
        known = far.get(name) or Controlled.of(true, kinds.get(kind_of(name), 0.0))
        far[name] = known.against(runs)
    for asked in [asked for asked in trial.known if asked[0] == trial.reference.control]:
        del trial.known[asked]
    kept = tuple({name: run[name] for name in run if name not in names} for run in evidence.controls)
    return replace(evidence, controls=kept, far=far)


def control_run(trial: Trial) -> Mapping[str, Tensor]:
    """The first control run of training from the start."""
    return trial.dense(trial.reference.control, part="control")


def _stepped(
    trial: Trial, function: Function, states: Mapping[str, Tensor] | None, **words: int
) -> Mapping[str, Tensor]:
    """A function of the reference that begins its steps at these states, when there are any."""
    if states:
        return trial.computed(function, part="control", states=states, **words)
    return trial.dense(function, part="control", **words)
