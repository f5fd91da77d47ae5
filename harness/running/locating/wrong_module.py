"""The first wrong module of a failed case whose subject does not say how its activations lie.

Modules are captured call by call: those of the subject on all ranks of an engine, those of a dense model in this
thread.
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
"""Captured tensors may take this many times the memory that autograd saves: inputs, outputs and the gradients of both,
of subject and truth.
"""
_PARTS = 2
"""The number of partial sums in the control run of a subject that is its own truth."""
_LATER = frozenset({"act", "act_grad", "grad", "grad_norm", "tokens", "param", "metric"})
"""Kinds of tensors that a forward of step 0 does not compute, or that modules compute themselves."""


def with_wrong_module(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """The evidence with the first wrong module of step 0, found in another run without any declared layout.

    Unchanged if there is no truth, if activations were compared by their declared layout, if nothing of step 0 is
    wrong, or if truth and subject have no modules in common. An error of that run is noted as a problem of the
    explanation.
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
    except Exception as problem:  # the verdict stands with a less exact place
        trial.problems["explanation"] = f"the first wrong module could not be looked for: {error_text(problem)}"
        return evidence


def modules_of(trial: Trial, evidence: Evidence) -> Watched | None:
    """The tensors of the modules of ranks and truth in step 0, from another run; None if the truth has no modules.

    Raises what the engine raises, and RequestError if the truth cannot be computed.
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
    """Run the subject once on all ranks. Returns by rank what its modules received and returned.

    Raises what the engine raises, and RequestError if the task cannot be sent to the processes of the ranks.
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
        if one.world_size > 1:  # outputs would have to be merged over ranks, in an unknown layout
            return ModuleCalls(outputs={}, inputs={}, gradients={}), [], False
        if trial.given:
            own = replace(own, call=names.own.with_masks(trial.given), address="")
        (calls,) = _ranks(trial, one.but(dtype=EXACT), own.sent)
        cut = InParts(own, PartialSums(parts=_PARTS))
        return calls, _ranks(trial, one, cut) if low and calls.outputs else [], False
    calls = _dense(names.truth, trial)
    return calls, [_dense(names.control, trial)] if low and calls.outputs else [], False


def _dense(function: Function, trial: Trial) -> ModuleCalls:
    """Run the dense model once in this thread. Returns what its modules received and returned; empty without any."""
    given = {"given": trial.given} if trial.given else {}
    with CallCapture() as capture, capture.on_rank(0):
        function(trial.case, torch.device(trial.device), **given)
        return capture.calls(0)


def _of_names(outcome: Mapping[str, Tensor]) -> ModuleCalls:
    """Activations by name, as one call of a module each."""

    def of(kind: str) -> dict[str, tuple[TensorCopy, ...]]:
        return {
            name.partition("/")[2]: (TensorCopy(blocks=blocks(tensor)),)
            for name, tensor in outcome.items()
            if kind_of(name) == kind
        }

    return ModuleCalls(outputs=of("act"), inputs={}, gradients=of("act_grad"))


def _alone(rank: int, task: RankTask) -> ModuleCalls:
    """The program of a rank that is a process."""
    subject = task.call
    with CallCapture() as capture, session(subject):
        return _beside(rank, subject, task.case, capture, rank_device(task.device, rank))


def _beside(rank: int, subject: Subject, case: CaseLike, capture: CallCapture, device: torch.device) -> ModuleCalls:
    """The program of a rank that shares the capture with all others."""
    with capture.on_rank(rank):
        call_subject(subject, case, device)
        return capture.calls(rank)
