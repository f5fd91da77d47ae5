"""The first wrong module of a failed case whose subject does not say how its activations lie."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import is_state, kind_of, step_of
from harness.diagnosing.placing.modules_by_name import Watched, located
from harness.errors import error_text
from harness.outcome.blocks import blocks
from harness.protocols import CaseLike, Subject
from harness.recording.capturing.module_calls import ModuleCalls, TensorCopy
from harness.running.locating.captured_run import calls_of_ranks, calls_of_truth
from harness.running.ranks.capacity import memory_bytes
from harness.running.ranks.execution import RankTask
from harness.running.trials.reference import Function
from harness.running.trials.trial import Trial
from harness.running.truth.own import EXACT, InParts, one_rank
from harness.subject import ALONE

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
    if evidence.torn or not (forward or backward) or any(kind_of(name) == "act" for name in evidence.returned):
        return evidence
    needed = _COPIES * sum(evidence.saved_bytes) * trial.case.micro
    if needed > memory_bytes() // 2:
        rule = f"its run would hold about {needed / 2**30:.3g} GiB of what modules return"
        trial.problems["explanation"] = f"the first wrong module was not looked for: {rule}; legal: smaller sizes"
        return evidence
    try:
        with trial.timed("located"):
            modules = modules_of(trial, evidence)
            found = None if modules is None else located(modules, forward=forward, backward=backward)
            return replace(evidence, located=found)
    except Exception as problem:  # the verdict stands; only its place is less exact
        trial.problems["explanation"] = f"the first wrong module could not be looked for: {error_text(problem)}"
        return evidence


def modules_of(trial: Trial, evidence: Evidence) -> Watched | None:
    """Tensors of the modules of the ranks and of the truth in step 0, by another run; None for a truth without any.

    Raises what the engine raises, and RequestError when the truth cannot be computed.
    """
    truth, controls, first_call = _truths(trial, evidence)
    if not truth.outputs:
        return None
    return Watched(
        ranks=_ranks(trial, trial.case, trial.subject.sent),
        truth=truth,
        axes=evidence.axes,
        dtype=(evidence.lower or evidence).dtype,
        controls=controls,
        first_call=first_call,
        events=evidence.events,
    )


def _ranks(trial: Trial, case: CaseLike, subject: str | Subject) -> list[ModuleCalls]:
    task = RankTask(case=case, subject=subject, device=trial.device, text=trial.text)
    return calls_of_ranks(task, trial.engine, trial.timeout_s)


def _truths(trial: Trial, evidence: Evidence) -> tuple[ModuleCalls, list[ModuleCalls], bool]:
    """The modules of the truth and of its control runs, and whether they are those of the first micro-batch alone."""
    names, case, low = trial.reference, trial.case, trial.case.dtype != EXACT
    named = {} if names.own else trial.true()
    if any(kind_of(name) == "act" for name in named):
        runs = evidence.controls
        if low and not any(kind_of(name) == "act" for run in runs for name in run):
            runs = (trial.dense(names.control, part="control"),)
        return _of_names(named), [_of_names(run) for run in runs], True
    given = trial.given or None
    if names.own and names.own.dense == ALONE:
        one, own = one_rank(case, trial.subject), trial.subject
        if given:
            own = replace(own, call=names.own.with_masks(given), address="")
        (calls,) = _ranks(trial, one.but(dtype=EXACT), own.sent)
        return calls, _ranks(trial, one, InParts(own, _PARTS)) if low and calls.outputs else [], False
    calls = calls_of_truth(_function(names.truth, given), case, trial.device)
    more = [calls_of_truth(_function(names.control, given), case, trial.device)] if low and calls.outputs else []
    return calls, more, False


def _function(function: Function, given: Mapping[str, Tensor] | None) -> Function:
    return function if given is None else partial(function, given=given)


def _of_names(outcome: Mapping[str, Tensor]) -> ModuleCalls:
    """Activations by their names as the calls of modules, one for each."""

    def of(kind: str) -> dict[str, tuple[TensorCopy, ...]]:
        return {
            name.partition("/")[2]: (TensorCopy(blocks=blocks(tensor)),)
            for name, tensor in outcome.items()
            if kind_of(name) == kind
        }

    return ModuleCalls(outputs=of("act"), inputs={}, gradients=of("act_grad"))
