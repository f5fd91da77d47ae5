"""The findings of a run: a tensor that looks wrong is judged only after all that is known of rounding was applied.

In float64 every tensor is first compared with training from the start, which rounding changes by about 1e-13 unless
training amplifies it. Where the first step agrees and a later one does not:

1. Every step is compared with the dense model's step from the state that the subject had before it. What Adam may make
   of gradients within rounding of zero is allowed; a larger error is wrong.
2. If no step is wrong, training from the start still decides about every tensor for which it is well conditioned, which
   means that control runs allow no more than CONDITIONED. With Adam it never is: full steps are made out of rounding.

In lower precision the steps are compared as in 1 from the beginning. No error that rounding may explain is called wrong
before more control runs were made.

Tensors beyond these limits are judged again where the case computes or sends in a lower precision
(harness.running.trials.lower_precision).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from shardproof.harness.checking.checks import LAWS, Check, run_checks
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.distance import distance
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS, is_state, kind_of, step_of
from shardproof.harness.checking.measures.many_tensors import Numbers
from shardproof.harness.checking.measures.measured import Measured
from shardproof.harness.checking.measures.tolerance import CONTROL_FACTOR, FLOAT64_CEILING, Controlled
from shardproof.harness.checking.measuring import compare_with_truth, movement_of, sizes_of, unless_zero
from shardproof.harness.checking.records import Evidence, RecordedRun, Truth
from shardproof.harness.running.trials.law_runs import with_first_forward
from shardproof.harness.running.trials.lower_precision import (
    Found,
    declared_precision,
    in_first_step,
    rejudge_declared,
    rejudge_detected,
    rejudge_unseen,
    wrong_of,
)
from shardproof.harness.running.trials.own_steps import judge_own_steps
from shardproof.harness.running.trials.trial import Function, Trial
from shardproof.harness.running.truth.control_modes import AMPLIFIED
from shardproof.harness.torch_internals.autograd import give_back

MORE_PARTS = (1, 2, 3, 4, 5, 6, 7, 8)
"""The numbers of partial sums into which further control runs split their sums. With 1 only the order of micro-batches
is reversed.
"""
FURTHER_PARTS = (10, 12, 14)
"""The same for errors of at most NEAR limits. With an even number the decoder uses torch's fused attention."""
NEAR = 3.0
"""The limit of an error may be too small by this factor at most, because all control runs happened to differ little."""
_OF_PARAMETERS = ("grad", "param")
"""Kinds of tensors with the shapes of parameters."""
_LARGE = 2**20
"""Control runs do not keep tensors of more elements."""


def step_from_states(trial: Trial, run: RecordedRun, truth: Truth) -> Truth:
    """The truth in which every step begins with the subject's state before it. Unless all states were returned, the
    truth stays as it is.

    A bound on what Adam makes of rounding in one step is added to that truth. In lower precision any truth gets a first
    control run, whose steps begin with the same states.
    """
    names = trial.reference
    if truth.controls.states is not None:
        return truth
    states = _states(trial, run) if names.model else None
    runs = (_from_states(trial, names.control, states),) if run.dtype != "float64" else ()
    controls = replace(truth.controls, runs=runs, distances={})
    if states is None:
        return replace(truth, controls=controls)
    stepped = trial.compute_anew(names.truth, states=states) if states else trial.dense(names.truth)
    known = {name: stepped.get(name, tensor) for name, tensor in truth.tensors.items()}
    bound = _adam_bound(trial, states, stepped, runs)
    return replace(truth, tensors=known, controls=replace(controls, states=states, adam_bound=bound))


def _states(trial: Trial, run: RecordedRun) -> dict[str, Tensor] | None:
    """The subject's states after all steps but the last; {} if there is one step, None if a state is missing."""
    steps = trial.case.steps
    before = [n for n in trial.dense(trial.reference.truth) if is_state(n) and step_of(n) < steps - 1]
    if steps > 1 and (not before or any(name not in run.tensors for name in before)):
        return None
    return {name: run.tensors[name] for name in before}


def _adam_bound(
    trial: Trial, states: Mapping[str, Tensor], truth: Mapping[str, Tensor], controls: Sequence[Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    model = trial.reference.model
    with trial.time_part("control"):
        return model.bound_adam(trial.case, states, truth, controls) if model else {}


def may_be_rounding(trial: Trial, run: RecordedRun, wrong: Collection[Measured]) -> bool:
    """Whether rounding may explain something that is wrong, or all of it if only the verdict counts.

    In float64 it explains only errors that are as small as noise.
    """
    doubts = [run.dtype != "float64" or measured.error < FLOAT64_CEILING for measured in wrong]
    return bool(doubts) and (all(doubts) if trial.verdict_alone else any(doubts))


def add_controls(trial: Trial, run: RecordedRun, truth: Truth, wrong: Collection[Measured]) -> Iterator[Truth]:
    """The truth with one control run more each time, and at last with everything that may bound these errors.

    The control runs are those of MORE_PARTS, since one may differ little by chance. If an error is just beyond its
    limit then, those of FURTHER_PARTS are added, since all may have done so. If it still is, a choice may have gone
    another way: a truth of the subject's own gets AMPLIFIED runs, and for our dense model such choices are bounded by
    relu flips and by Adam's bound.
    """
    names, states, before = trial.reference, truth.controls.states, truth.tensors
    for parts in MORE_PARTS:
        truth = _with_control_run(trial, run, truth, parts)
        yield truth
    for parts in FURTHER_PARTS:
        if not 1 < _find_furthest(run, truth, wrong) <= NEAR:
            break
        truth = _with_control_run(trial, run, truth, parts)
        yield truth
    controls = truth.controls
    if names.own is not None and _find_furthest(run, truth, wrong) > 1:
        runs = (trial.dense(names.control, part="control", parts=parts) for parts in AMPLIFIED)
        controls = replace(controls, amplified=tuple(runs))
    model = names.model
    flips = tuple(_from_states(trial, model.measure_relu_flips, states, side=side) for side in (1, -1)) if model else ()
    every = {} if states is None else {**trial.dense(names.truth), **before}
    bound = {} if states is None else _adam_bound(trial, states, every, controls.runs)
    yield replace(truth, controls=replace(controls, relu_flips=flips, adam_bound=bound))


def _with_control_run(trial: Trial, run: RecordedRun, truth: Truth, parts: int) -> Truth:
    give_back(truth.tensors.values())
    another = _from_states(trial, trial.reference.control, truth.controls.states, parts=parts)
    controls = replace(truth.controls, runs=(*truth.controls.runs, another))
    return shed_large_controls(trial, run, replace(truth, controls=controls))


def _find_furthest(run: RecordedRun, truth: Truth, wrong: Collection[Measured]) -> float:
    """The largest error of the tensors that were wrong, in units of the limits that control runs now give."""
    kinds = {kind_of(measured.name) for measured in wrong}
    rms = sizes_of(run, truth, [name for name in truth.tensors if kind_of(name) in kinds])
    return max(
        (compare_with_truth(run, truth, one.name, rms.get(kind_of(one.name), 0.0)).ratio for one in wrong), default=0.0
    )


def shed_large_controls(trial: Trial, run: RecordedRun, truth: Truth) -> Truth:
    """The truth with the distances of its control runs in place of their large tensors.

    Unchanged for a subject's own truth, since other groupings are compared with its control runs too.
    """
    runs = truth.controls.runs
    tensors = [pair for control in runs for pair in control.items() if kind_of(pair[0]) in _OF_PARAMETERS]
    names = {name for name, tensor in tensors if tensor.numel() > _LARGE and tensor.is_floating_point()}
    if not names or trial.reference.own:
        return truth
    distances = dict(truth.controls.distances)
    parameters = [name for name in truth.tensors if kind_of(name) in _OF_PARAMETERS]
    kinds = {} if distances else sizes_of(run, truth, parameters)
    for name in names & truth.tensors.keys():
        moved = movement_of(run, truth, name)
        true: Numbers = truth.tensors[name] if moved is None else moved.truth
        found = [control[name] for control in runs if name in control] if moved is None else moved.controls
        known = distances.get(name) or Controlled.of(true, kinds.get(kind_of(name), 0.0))
        distances[name] = known.against(found, None if moved is None else unless_zero(moved.stored))
    for asked in [asked for asked in trial.known if asked[0] == trial.reference.control]:
        del trial.known[asked]
    kept = tuple({name: control[name] for name in control if name not in names} for control in runs)
    return replace(truth, controls=replace(truth.controls, runs=kept, distances=distances))


def control_run(trial: Trial) -> Mapping[str, Tensor]:
    """The first control run of training from the start."""
    return trial.dense(trial.reference.control, part="control")


def _from_states(
    trial: Trial, function: Function, states: Mapping[str, Tensor] | None, **words: int
) -> Mapping[str, Tensor]:
    """The outcome of a function of the reference, whose steps begin with these states if there are any."""
    if states:
        return trial.compute_anew(function, part="control", states=states, **words)
    return trial.dense(function, part="control", **words)


Findings = dict[str, Finding]
CONDITIONED = 1e-8
"""Training from the start is well conditioned for a tensor if control runs of it allow no more than this."""


def recheck(trial: Trial, evidence: Evidence, checks: Mapping[str, Check], findings: Findings | None = None) -> Found:
    """The findings of these checks, and the evidence with all control runs that they needed.

    `findings`: those of the evidence as it is, in float64.
    """
    precision = declared_precision(trial, evidence.run.calls)
    found = judge_own_steps(trial, _judge(trial, evidence, checks, findings), checks)
    found = rejudge_unseen(trial, found, checks)
    return (
        rejudge_detected(trial, found, checks)
        if precision is None
        else rejudge_declared(trial, found, checks, precision)
    )


def _judge(trial: Trial, evidence: Evidence, checks: Mapping[str, Check], findings: Findings | None = None) -> Found:
    run = evidence.run
    if run.dtype != "float64":
        truth = step_from_states(trial, run, evidence.truth)
        evidence = replace(evidence, truth=with_first_forward(trial, truth) if "truth" in checks else truth)
        findings = None
    findings = findings or run_checks(evidence, checks)
    wrong = wrong_of(findings)
    if may_be_rounding(trial, run, wrong):
        evidence = replace(evidence, truth=shed_large_controls(trial, run, evidence.truth))
    truth = evidence.truth
    if truth.controls.states is not None or not wrong or any(in_first_step(measured.name) for measured in wrong):
        return _with_more_controls(trial, evidence, findings, checks)
    stepped = replace(evidence, truth=step_from_states(trial, run, truth))
    if stepped.truth.controls.states is None:
        return _with_more_controls(trial, evidence, findings, checks)
    one_step = _with_more_controls(trial, stepped, _judge_again(stepped, findings, checks), checks)
    conditioned = (_is_conditioned(trial, truth, measured.name) for measured in wrong)
    if wrong_of(one_step[1]) or stepped.truth.controls.adam_bound or not any(conditioned):
        return one_step
    from_start = _with_more_controls(trial, evidence, findings, checks)
    return from_start if any(m.allowed <= CONDITIONED for m in wrong_of(from_start[1])) else one_step


def _is_conditioned(trial: Trial, truth: Truth, name: str) -> bool:
    """Whether the first control run of training from the start is near enough for this tensor."""
    control, true = control_run(trial), truth.tensors
    return name in control and CONTROL_FACTOR * distance(control[name], true[name]).frobenius <= CONDITIONED


def _with_more_controls(
    trial: Trial, evidence: Evidence, findings: dict[str, Finding], checks: Mapping[str, Check]
) -> Found:
    """The findings with more control runs, if rounding may explain what is wrong.

    Limits only grow with control runs, so the runs end as soon as nothing is beyond its limit. This is tried once: what
    is wrong then is wrong by more than its distance from the truth, as a law is, and takes all runs.
    """
    wrong = wrong_of(findings)
    if not may_be_rounding(trial, evidence.run, wrong):
        return evidence, findings
    judged = False
    for truth in add_controls(trial, evidence.run, evidence.truth, wrong):
        evidence = replace(evidence, truth=truth)
        if not judged and _find_furthest(evidence.run, truth, wrong) <= 1:
            judged, again = True, _judge_again(evidence, findings, checks)
            if not wrong_of(again):
                return evidence, again
    return evidence, _judge_again(evidence, findings, checks)


def _judge_again(
    evidence: Evidence, findings: Mapping[str, Finding], checks: Mapping[str, Check]
) -> dict[str, Finding]:
    """The findings after the checks that compare numbers ran again, with large tensors only those that failed."""
    numbers = {name: checks[name] for name in findings if name in NUMERIC_KINDS or name in LAWS}
    if evidence.truth.controls.distances:
        numbers = {name: check for name, check in numbers.items() if findings[name].wrong}
    return {**findings, **run_checks(evidence, numbers)}
