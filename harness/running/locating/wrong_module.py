"""The first wrong module of a failed case whose subject does not say how its activations lie.

Its runs capture modules call by call: a subject on all ranks of an engine, a dense model in this thread.
"""

from collections.abc import Collection, Mapping
from contextlib import chdir
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardproof.harness.checking.measures.kinds import is_state, kind_of, step_of
from shardproof.harness.checking.records import Evidence, Truth
from shardproof.harness.diagnosing.placing.modules_by_name import Watched, locate_wrong_module
from shardproof.harness.engines.rank_environment import rank_device
from shardproof.harness.errors import error_text
from shardproof.harness.outcome.blocks import blocks
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.recording.capturing.module_calls import CallCapture, ModuleCalls, TensorCopy
from shardproof.harness.running.ranks.capacity import memory_bytes
from shardproof.harness.running.ranks.execution import RankTask, sendable
from shardproof.harness.running.trials.trial import Function, Trial
from shardproof.harness.running.truth.own import EXACT, InParts, PartialSums
from shardproof.harness.subject import OnRanks, call_subject, kept_per_rank, session

_COPIES = 8
"""How often what autograd saves is held at most: inputs, outputs and the gradients of both, of subject and truth."""
_PARTS = 2
"""Into how many partial sums the control run of a subject that is its own truth cuts its sums."""
_LATER = frozenset({"act", "act_grad", "grad", "grad_norm", "tokens", "param", "metric"})
"""Kinds of names that a forward of step 0 does not compute, or that modules compute themselves."""


def with_wrong_module(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """Evidence with the first wrong module of step 0, found in another run without any declared layout.

    The evidence stays when there is no truth, or when activations were compared by their declared layout. So it does
    when nothing of step 0 is wrong, or when truth and subject have no modules in common. An error that keeps the run
    from being made is noted as a problem of the explanation.
    """
    first_forward = (name for name in wrong if kind_of(name) not in _LATER and not is_state(name))
    forward = any(step_of(name) <= 0 for name in first_forward)
    backward = any(kind_of(name) == "grad" for name in wrong)
    activations = any(kind_of(name) == "act" for name in evidence.run.returned)
    if evidence.truth.unmergeable or not (forward or backward) or activations:
        return evidence
    needed = _COPIES * sum(evidence.run.calls.saved_bytes) * trial.case.micro
    if needed > memory_bytes() // 2:
        rule = f"its run would hold about {needed / 2**30:.3g} GiB of what modules return"
        trial.problems["explanation"] = f"the first wrong module was not looked for: {rule}; legal: smaller sizes"
        return evidence
    if not trial.has_time("located"):
        return evidence
    try:
        with trial.time_part("located"):
            modules = modules_of(trial, evidence)
            found = None if modules is None else locate_wrong_module(modules, forward=forward, backward=backward)
            return evidence.with_found(located=found)
    except Exception as problem:  # the verdict stands; only its place is less exact
        trial.problems["explanation"] = f"the first wrong module could not be looked for: {error_text(problem)}"
        return evidence


def modules_of(trial: Trial, evidence: Evidence) -> Watched | None:
    """Tensors of the modules of the ranks and of the truth in step 0, by another run; None for a truth without any.

    Raises what the engine raises, and RequestError when the truth cannot be computed.
    """
    truth, controls, first_call = _truths(trial, evidence.truth)
    if not truth.outputs:
        return None
    return Watched(
        ranks=_ranks(trial, trial.case, trial.subject.sent),
        truth=truth,
        axes=evidence.claims.axes,
        dtype=evidence.run.lower.dtype or evidence.run.dtype,
        controls=controls,
        first_call=first_call,
        events=evidence.run.calls.events,
    )


def _ranks(trial: Trial, case: CaseLike, subject: str | Subject) -> list[ModuleCalls]:
    """Run the subject once on all ranks; by rank, what its modules were given and returned.

    Raises what the engine raises, and RequestError when the task cannot be sent to the processes of the ranks.
    """
    task = RankTask(case=case, subject=subject, device=trial.device, text=trial.text)
    run = partial(trial.engine.run, world_size=case.world_size, seed=case.seed, timeout_s=trial.limit_s)
    if trial.engine.remote:
        return run(_alone, sendable(task))
    device, call = torch.device(task.device), task.call
    with CallCapture() as capture, chdir("."), session(call):
        return run(_beside, call, case, capture, device, per_rank=kept_per_rank(call))


def _truths(trial: Trial, truth: Truth) -> tuple[ModuleCalls, list[ModuleCalls], bool]:
    """The modules of the truth and of its control runs, and whether they are those of the first micro-batch alone."""
    names, case, low = trial.reference, trial.case, trial.case.dtype != EXACT
    named = {} if names.own else trial.true()
    if any(kind_of(name) == "act" for name in named):
        runs = truth.controls.runs
        if low and not any(kind_of(name) == "act" for run in runs for name in run):
            runs = (trial.dense(names.control, part="control"),)
        return _of_names(named), [_of_names(run) for run in runs], True
    if names.own and isinstance(names.own.dense, OnRanks):
        one, own = names.own.dense.case_of(case), names.own.dense.subject
        if one.world_size > 1:  # what its modules return would have to be merged, and nothing says how
            return ModuleCalls(outputs={}, inputs={}, gradients={}), [], False
        if trial.given:
            own = replace(own, call=names.own.with_masks(trial.given), address="")
        (calls,) = _ranks(trial, one.but(dtype=EXACT), own.sent)
        cut = InParts(own, PartialSums(parts=_PARTS))
        return calls, _ranks(trial, one, cut) if low and calls.outputs else [], False
    calls = _dense(names.truth, trial)
    return calls, [_dense(names.control, trial)] if low and calls.outputs else [], False


def _dense(function: Function, trial: Trial) -> ModuleCalls:
    """Run the dense model once in this thread; what its modules were given and returned, nothing when it has none."""
    given = {"given": trial.given} if trial.given else {}
    with CallCapture() as capture, capture.on_rank(0):
        function(trial.case, torch.device(trial.device), **given)
        return capture.calls(0)


def _of_names(outcome: Mapping[str, Tensor]) -> ModuleCalls:
    """Activations by their names as the calls of modules, one for each."""

    def of(kind: str) -> dict[str, tuple[TensorCopy, ...]]:
        return {
            name.partition("/")[2]: (TensorCopy(blocks=blocks(tensor)),)
            for name, tensor in outcome.items()
            if kind_of(name) == kind
        }

    return ModuleCalls(outputs=of("act"), inputs={}, gradients=of("act_grad"))


def _alone(rank: int, task: RankTask) -> ModuleCalls:
    """The program of a rank that has its process for itself."""
    subject = task.call
    with CallCapture() as capture, session(subject):
        return _beside(rank, subject, task.case, capture, rank_device(task.device, rank))


def _beside(rank: int, subject: Subject, case: CaseLike, capture: CallCapture, device: torch.device) -> ModuleCalls:
    """The program of a rank where all ranks share the capture."""
    with capture.on_rank(rank):
        call_subject(subject, case, device)
        return capture.calls(rank)
