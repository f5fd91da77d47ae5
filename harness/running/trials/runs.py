"""The records of one case, from the recorded run, the plain run if needed, and the dense model; then its findings.

The dense model is computed after the runs of the ranks unless they need it: both in float64 could fill the memory.
If the subject's own code fails to make one of its statements, that is a problem of the check that needs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from shardproof.harness.checking.checks import CHECKS, Check, run_checks, select_checks_by_need
from shardproof.harness.checking.coverage import ROUTING
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of, select_comparable
from shardproof.harness.checking.measures.stated_deviations import Deviations
from shardproof.harness.checking.measures.tolerance import FLOAT64_CEILING
from shardproof.harness.checking.measuring import MOVED
from shardproof.harness.checking.records import Calls, Claims, Evidence, RecordedRun, Repeats, Truth, merged_outcomes
from shardproof.harness.checking.repeats import same_outcomes
from shardproof.harness.errors import MachineError, ProgramError, RequestError, ShardproofError
from shardproof.harness.outcome.merging import Flaw, Merged, Outcomes, held_once, match_truth, merge_outcomes
from shardproof.harness.protocols import Axes, TermLike
from shardproof.harness.recording.capturing.drawn_values import WithFirstValues, WithMasks, first_blocks
from shardproof.harness.running.trials.rounding import recheck
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.running.truth.joint_masks import masks_of
from shardproof.harness.subject import Unanswered, deviations, left_out, orders, state_terms, stated_deviations
from shardproof.harness.torch_internals.autograd import give_back
from shardproof.harness.verdicts.facts import state_fact, state_text
from shardproof.harness.verdicts.verdict import UNKNOWN

if TYPE_CHECKING:
    from shardproof.harness.checking.measures.stated_deviations import Deviations
    from shardproof.harness.running.truth.own import OwnTruth

T = TypeVar("T")


def expectation_of(trial: Trial) -> tuple[TermLike, ...] | None:
    """The subject's closed form, None without one. If it raises, that is noted as a problem."""
    return ask_subject(trial, "expectation", lambda: state_terms(trial.case, trial.subject.call), None)


def orders_of(trial: Trial) -> Axes:
    """The subject's own rank orders, empty without any. Invalid rank lists are noted as a problem."""
    return ask_subject(trial, "groups", lambda: orders(trial.case, trial.subject.call), {})


def deviations_of(trial: Trial) -> Mapping[str, float]:
    """What the subject, or else the reference, states about initial values."""
    none: Mapping[str, float] = {}
    own = ask_subject(trial, "initial_values", lambda: deviations(trial.case, trial.subject.call), none)
    model = trial.reference.model
    return own or (model.initial_deviations(trial.case) if model else {})


def ask_subject(trial: Trial, check: str, ask: Callable[[], T], without: T) -> T:
    """A statement of the subject about itself. If its own code fails, `without`, and a noted problem of this check."""
    try:
        return ask()
    except Unanswered as problem:  # no verdict on the run, but it must not look as if nothing were stated
        trial.problems[check] = str(problem)
        return without


GIVEN = "mask", "init"
"""Kinds of tensors (dropout masks, initial weights) that a truth may take from the ranks instead of drawing its own."""


def record_case(trial: Trial, *, repeat: bool = False, compare: bool = True) -> Evidence:
    """The records of one recorded run and of the dense model, with `repeat` also of a plain run; no control runs.

    `trial.reference` is the dense model: `own` if the subject brings one, else `model`, our decoder. Without `compare`
    it is not computed. Raises RequestError if the dense model cannot be computed, and what the engine raises.
    """
    if not compare:
        return _with_repeats(trial, _record(trial, {}, (), compare=False), repeat)
    kinds = _kinds(trial)
    if kinds or trial.reference.own:  # first, if the truth needs what ranks drew or belongs to the subject
        return _with_repeats(trial, _record(trial, {} if kinds else trial.true(), kinds), repeat)
    try:
        evidence = _with_repeats(trial, _record(trial, {}, ()), repeat)
    except ShardproofError:
        trial.true()  # if the dense model refuses the case, that is the error to raise
        raise
    true = trial.true()
    compared = select_comparable(true, evidence.run.outcomes)
    run = replace(evidence.run, merged=match_truth(evidence.run.merged, true))
    return replace(evidence, run=run, truth=replace(evidence.truth, tensors=compared, initial=trial.initial(compared)))


def repeat_plainly(trial: Trial, run: RecordedRun) -> Repeats:
    """The outcome of an unrecorded run, and of a second one if the first does not have the bits of the recorded run.

    This takes time, so it is done only if a check or a diagnosis needs it.
    """
    try:
        with trial.time_part("plain"):
            plain = trial.run(trial.subject.call, name=trial.subject.address)
        if same_outcomes(run.outcomes, plain.outcomes):
            return Repeats(runs=(run.outcomes,))  # it has the same bits, and the other one can be freed
        with trial.time_part("again"):  # shows whether the subject is not deterministic, or the recording disturbs it
            again = trial.run(trial.subject.call, name=trial.subject.address)
    except MachineError as error:  # no failure of the case, whose own run has ended
        return Repeats(problem=error.cause)
    return Repeats(runs=(plain.outcomes, again.outcomes))


def _with_repeats(trial: Trial, evidence: Evidence, repeat: bool) -> Evidence:
    return replace(evidence, repeats=repeat_plainly(trial, evidence.run)) if repeat else evidence


def _kinds(trial: Trial) -> tuple[str, ...]:
    """The kinds of tensors that the truth takes from the outcome of the ranks: dropout masks, choices of experts."""
    own, model = trial.reference.own, trial.reference.model
    if own:
        return (*(GIVEN if own.takes_given else ()), *((ROUTING,) if own.takes_routing else ()))
    return model.list_given_kinds(trial.case) if model else ()


def _record(trial: Trial, truth: Mapping[str, Tensor], kinds: Sequence[str], *, compare: bool = True) -> Evidence:
    """The records of one recorded run beside this truth, or beside one that takes these kinds of tensors from it."""
    case, own, torn, lost = trial.case, trial.reference.own if compare else None, False, list[Flaw]()
    axes, expectation = {**trial.case.axes, **orders_of(trial)}, expectation_of(trial)
    draws = own.draws.get(trial.text, ()) if own and not own.takes_given else ()
    masks: Outcomes = ()
    drawn, problem, hides = None, "", any(getattr(term, "hidden", False) for term in expectation or ())
    how: dict[str, Any] = {"record": True, "watch": True, "overlap": hides}
    if draws:
        with trial.time_part("recorded"):
            run = trial.run(WithMasks(trial.subject), **how)
        ranks = masks_of(case, axes, draws, run.outcomes)
        returned, masks, drawn, problem = ranks.outcomes, ranks.masks, ranks.draws, ranks.problem
        del ranks
    else:
        with trial.time_part("recorded"):
            run = trial.run(trial.subject.call, name=trial.subject.address, **how)
        returned = run.outcomes
    if problem:
        trial.problems["masks"], truth, torn = problem, {}, True
    elif kinds or draws:
        merged = merged_outcomes(returned, masks, {} if draws else truth)
        truth, lost = _truth_from_ranks(trial, kinds or GIVEN, merged)
    if run.problem:
        trial.problems["activations"] = run.problem
    captured = _add_masks(run.captured, masks, truth if own else None)
    compared = select_comparable(truth, returned)
    model = trial.reference.model
    declared: tuple[str, ...] = ask_subject(trial, "coverage", lambda: left_out(trial.subject), ())
    merged = merged_outcomes(returned, captured, truth)
    known = {flaw.name for flaw in merged.flaws}
    merged = replace(merged, flaws=(*merged.flaws, *(flaw for flaw in lost if flaw.name not in known)))
    outcomes, captured = held_once(returned, merged), held_once(captured, merged)
    run = replace(run, outcomes=(), captured=())
    del returned
    give_back(merged.tensors.values())
    calls = Calls(
        case=case,
        events=run.events,
        unwaited=run.unwaited,
        saved_bytes=run.saved_bytes,
        hidden=run.hidden,
        spans=run.spans,
        packed=run.packed,
    )
    return Evidence(
        run=RecordedRun(calls=calls, merged=merged, outcomes=outcomes, captured=captured, mask_draws=drawn),
        truth=Truth(
            tensors=compared,
            initial=trial.initial(compared) or _first_values_of_ranks(trial, own, compared),
            unread=model.unread_rows(case) if model and compare else (),
            from_ranks=tuple(trial.given),
            unmergeable=torn or bool(lost),
            init_std=deviations_of(trial) if any(kind_of(name) == "init" for name in merged.tensors) else {},
        ),
        claims=Claims(
            axes=axes, expectation=expectation, declared=declared, known_differences=_known_differences(trial)
        ),
    )


def _first_values_of_ranks(trial: Trial, own: "OwnTruth | None", truth: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The initial values of the ranks' parameters, for a truth of the subject's own that shows none.

    Such a truth is written in numpy, or its parameters are no leaves of autograd. Empty in 16 bits: the truth begins
    with values that are not rounded to the case's dtype, and there such a rounding is more than a step.
    """
    narrow = getattr(torch, trial.case.dtype).itemsize <= 2
    if own is None or narrow or not any(kind_of(name) in MOVED for name in truth):
        return {}
    try:
        with trial.time_part("again"):
            ranks = trial.run(WithFirstValues(trial.subject)).outcomes
    except (ProgramError, MachineError):  # a dispatch mode may break a program, which shows nothing about it
        return {}
    starts = [{name: (block,) for name, block in first_blocks(outcome).items()} for outcome in ranks]
    return merge_outcomes(starts).tensors


def _add_masks(captured: Outcomes, masks: Outcomes, own: Mapping[str, Tensor] | None) -> Outcomes:
    """The activations and masks of every rank; for a truth of the subject's `own` only those that it returns."""
    if own is not None:
        captured = tuple({name: rank[name] for name in rank if name in own} for rank in captured)
    if not masks or not captured:
        return captured or masks
    return tuple({**a, **b} for a, b in zip(captured, masks, strict=True))


def _known_differences(trial: Trial) -> "Deviations | None":
    """The subject's statement of how tensors deviate from the truth."""
    stated = stated_deviations(trial.case, trial.subject)
    if not stated:
        return None
    return Deviations(
        {pattern: its.sentence for pattern, its in stated.items()},
        frozenset(pattern for pattern, its in stated.items() if its.truth is not None),
    )


def _truth_from_ranks(trial: Trial, kinds: Sequence[str], merged: Merged) -> tuple[Mapping[str, Tensor], list[Flaw]]:
    """The truth computed from what the ranks drew, and no flaws; or what of that did merge, and why there is no truth.

    Flaws are of what does not merge, or was returned by no rank although the truth looks it up.
    """
    trial.given.update({name: tensor for name, tensor in merged.tensors.items() if kind_of(name) in kinds})
    trial.known.clear()  # earlier results may follow from other numbers than this run drew
    if flaws := [flaw for flaw in merged.flaws if kind_of(flaw.name) in kinds]:
        return dict(trial.given), flaws
    try:
        return {**trial.dense(trial.reference.truth), **trial.given}, []
    except RequestError as problem:
        name = _name_not_given(problem)
        if kind_of(name) not in kinds:
            raise
        return dict(trial.given), [Flaw(name=name, kind="omission", fact=state_fact("not_given"), ranks=())]


def _name_not_given(problem: BaseException) -> str:
    """The name that a truth looked up in vain, by the KeyError that led to this error; "" if there is none."""
    led: BaseException | None = problem
    while led is not None:
        if isinstance(led, KeyError) and led.args and isinstance(led.args[0], str):
            return led.args[0]
        led = led.__cause__
    return ""


def judge_case(
    trial: Trial, evidence: Evidence, checks: Mapping[str, Check] = CHECKS
) -> tuple[Evidence, dict[str, Finding]]:
    """The findings of these checks, and the evidence with the control runs that they needed.

    Tensors that look wrong, or are in a lower precision, are compared again with control runs of the dense model. These
    show how far rounding alone takes a right result.
    """
    findings = None
    if not select_checks_by_need(checks, Truth):
        return evidence, run_checks(evidence, checks)
    if evidence.truth.unmergeable or evidence.run.dtype == "float64":
        findings = run_checks(evidence, checks)
        if evidence.truth.unmergeable or not any(finding.wrong for finding in findings.values()):
            return evidence, findings
    try:
        return recheck(trial, evidence, checks, findings)
    except MachineError as error:
        if findings is None:
            raise
        return evidence, {check: _without_controls(finding, error) for check, finding in findings.items()}


def _without_controls(finding: Finding, error: MachineError) -> Finding:
    """The finding if control runs did not end: unknown if rounding may explain all that is wrong."""
    if not finding.wrong or any(measured.error >= FLOAT64_CEILING for measured in finding.wrong):
        return finding
    return Finding(verdict=UNKNOWN, facts=(*finding.facts, state_text(error.cause)), notes=finding.notes)
