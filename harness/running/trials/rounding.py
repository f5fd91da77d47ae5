"""Limits of rounding: control runs, steps from the subject's own states, what Adam makes of rounding.

Each function adds to a truth what limits are made of (harness.checking.measures.tolerance); none
of them judges.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from shardproof.harness.checking.measures.kinds import is_state, kind_of, step_of
from shardproof.harness.checking.measures.measured import Measured
from shardproof.harness.checking.measures.tolerance import FLOAT64_CEILING, Controlled
from shardproof.harness.checking.measuring import compared, movement, sizes_of
from shardproof.harness.checking.records import Run, Truth
from shardproof.harness.running.trials.reference import Function
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.running.truth.control_modes import AMPLIFIED
from shardproof.harness.torch_internals.memory import give_back

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


def stepwise(trial: Trial, run: Run, truth: Truth) -> Truth:
    """The truth with every step begun at the subject's own state before it, where all were returned.

    What Adam makes of rounding in one step is added too. Else the truth stays. In lower precision with a first control
    run too, one step at a time where the truth is.
    """
    names = trial.reference
    if truth.controls.states is not None:
        return truth
    states = _states(trial, run) if names.model else None
    runs = (_stepped(trial, names.control, states),) if run.dtype != "float64" else ()
    controls = replace(truth.controls, runs=runs, distances={})
    if states is None:
        return replace(truth, controls=controls)
    stepped = trial.computed(names.truth, states=states) if states else trial.dense(names.truth)
    known = {name: stepped.get(name, tensor) for name, tensor in truth.tensors.items()}
    bound = _adam_bound(trial, states, stepped, runs)
    return replace(truth, tensors=known, controls=replace(controls, states=states, adam_bound=bound))


def _states(trial: Trial, run: Run) -> dict[str, Tensor] | None:
    """The subject's states after all steps but the last, {} where there is one step; None when one is missing."""
    steps = trial.case.steps
    before = [n for n in trial.dense(trial.reference.truth) if is_state(n) and step_of(n) < steps - 1]
    if steps > 1 and (not before or any(name not in run.tensors for name in before)):
        return None
    return {name: run.tensors[name] for name in before}


def _adam_bound(
    trial: Trial, states: Mapping[str, Tensor], truth: Mapping[str, Tensor], controls: Sequence[Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    model = trial.reference.model
    with trial.timed("control"):
        return model.adam_slack(trial.case, states, truth, controls) if model else {}


def doubtful(trial: Trial, run: Run, wrong: Collection[Measured]) -> bool:
    """Whether rounding may explain something that is wrong, or all of it where only the verdict counts.

    In float64 only errors that are as small as noise can be.
    """
    doubts = [run.dtype != "float64" or measured.error < FLOAT64_CEILING for measured in wrong]
    return bool(doubts) and (all(doubts) if trial.verdict_alone else any(doubts))


def controlled(trial: Trial, run: Run, truth: Truth, wrong: Collection[Measured]) -> Truth:
    """The truth with MORE_PARTS control runs more, for one may be lucky, and what a relu may flip.

    Of large tensors there are only as many as it takes until nothing of this is wrong: each costs as much as the ranks.
    Where something is still just beyond its limit, all of them may have been lucky, and there are FURTHER_PARTS. Then
    a choice may have fallen otherwise, so a truth of the subject's own is AMPLIFIED. Choices of our dense
    model are bounded by what relu flips and Adam's bound.
    """
    names, states, before = trial.reference, truth.controls.states, truth.tensors
    for parts in MORE_PARTS:
        truth = _with_control_run(trial, run, truth, parts)
        if truth.controls.distances and _furthest(run, truth, wrong) <= 1:
            break
    for parts in FURTHER_PARTS:
        if not 1 < _furthest(run, truth, wrong) <= NEAR:
            break
        truth = _with_control_run(trial, run, truth, parts)
    controls = truth.controls
    if names.own is not None and _furthest(run, truth, wrong) > 1:
        runs = (trial.dense(names.control, part="control", parts=parts) for parts in AMPLIFIED)
        controls = replace(controls, amplified=tuple(runs))
    model = names.model
    flips = tuple(_stepped(trial, model.kinks, states, side=side) for side in (1, -1)) if model else ()
    every = {} if states is None else {**trial.dense(names.truth), **before}
    bound = {} if states is None else _adam_bound(trial, states, every, controls.runs)
    return replace(truth, controls=replace(controls, relu_flips=flips, adam_bound=bound))


def _with_control_run(trial: Trial, run: Run, truth: Truth, parts: int) -> Truth:
    give_back(truth.tensors.values())
    another = _stepped(trial, trial.reference.control, truth.controls.states, parts=parts)
    controls = replace(truth.controls, runs=(*truth.controls.runs, another))
    return measured_apart(trial, run, replace(truth, controls=controls))


def _furthest(run: Run, truth: Truth, wrong: Collection[Measured]) -> float:
    """The largest error of what was wrong, in units of what the control runs allow by now."""
    kinds = {kind_of(measured.name) for measured in wrong}
    rms = sizes_of(run, truth, [name for name in truth.tensors if kind_of(name) in kinds])
    return max((compared(run, truth, one.name, rms.get(kind_of(one.name), 0.0)).ratio for one in wrong), default=0.0)


def measured_apart(trial: Trial, run: Run, truth: Truth) -> Truth:
    """The truth without the large tensors of its control runs: of them only how far they are from it.

    As it is where other groupings are held against control runs too.
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
        moved = movement(run, truth, name)
        true, found = truth.tensors[name], [control[name] for control in runs if name in control]
        if moved is not None:
            true, found = moved.truth, list(moved.controls)
        known = distances.get(name) or Controlled.of(true, kinds.get(kind_of(name), 0.0))
        distances[name] = known.against(found)
    for asked in [asked for asked in trial.known if asked[0] == trial.reference.control]:
        del trial.known[asked]
    kept = tuple({name: control[name] for name in control if name not in names} for control in runs)
    return replace(truth, controls=replace(truth.controls, runs=kept, distances=distances))


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
