"""The recorded run of one case and its dense model, as evidence; the plain run is `repeating` beside this file.

The dense model is computed after the ranks' runs unless these need it: both at once in float64 could fill the memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardproof.harness.checking.evidence import Evidence, merged_outcomes
from shardproof.harness.checking.measures.kinds import comparable, kind_of
from shardproof.harness.errors import ShardproofError
from shardproof.harness.outcome.merging import Merged, Outcomes, against, held_once
from shardproof.harness.running.trials.repeating import with_repeat
from shardproof.harness.running.trials.statements import asked, deviations_of, expectation_of, orders_of
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.subject import deviating, left_out
from shardproof.harness.torch_internals.autograd import give_back

if TYPE_CHECKING:
    from shardproof.harness.checking.measures.stated_deviations import Deviations

GIVEN = "mask", "init"
"""Kinds of tensors (dropout masks, initial weights) that a truth may take from the ranks instead of drawing its own."""


def recorded(trial: Trial, *, repeat: bool = False) -> Evidence:
    """The evidence of one recorded run beside the dense model, of a plain one too with `repeat`; no control runs.

    `trial.reference` is the dense model: `own` where the subject brings one, else `model`, our decoder. Raises
    RequestError when the dense model cannot be computed, and what the engine raises.
    """
    kinds = _kinds(trial)
    if kinds or trial.reference.own:  # the truth needs what ranks drew, or the subject has a truth of its own: first
        evidence = _recorded(trial, {} if kinds else trial.true(), kinds)
        return with_repeat(trial, evidence) if repeat else evidence
    try:
        evidence = _recorded(trial, {}, ())
        evidence = with_repeat(trial, evidence) if repeat else evidence
    except ShardproofError:
        trial.true()  # a case that the dense model refuses is refused, whatever its ranks do
        raise
    true = trial.true()
    compared = comparable(true, evidence.outcomes)
    return replace(evidence, merged=against(evidence.merged, true), truth=compared, initial=trial.initial(compared))


def _kinds(trial: Trial) -> tuple[str, ...]:
    """The kinds of tensors that the truth takes from the outcome of the ranks, such as masks of dropout."""
    own, model = trial.reference.own, trial.reference.model
    if own and own.takes_given:
        return GIVEN
    return model.given_kinds(trial.case) if model else ()


def _recorded(trial: Trial, truth: Mapping[str, Tensor], kinds: Sequence[str]) -> Evidence:
    """The evidence of one recorded run beside this truth, or beside one that takes these kinds of tensors from it."""
    case, own, torn = trial.case, trial.reference.own, False
    draws = own.draws.get(trial.text, ()) if own and not own.takes_given else ()
    masks: Outcomes = ()
    deviates, expectation = _deviates(trial), expectation_of(trial)
    hides = any(getattr(term, "hidden", False) for term in expectation or ())
    how: dict[str, Any] = {"record": True, "watch": True, "overlap": hides}
    drawn, problem = None, ""
    if draws:
        from shardproof.harness.recording.capturing.drawn_values import WithMasks  # noqa: PLC0415
        from shardproof.harness.running.truth.joint_masks import masks_of  # noqa: PLC0415

        with trial.timed("recorded"):
            run = trial.run(WithMasks(trial.subject), **how)
        ranks = masks_of(case, {**case.axes, **orders_of(trial)}, draws, run.outcomes)
        returned, masks, drawn, problem = ranks.outcomes, ranks.masks, ranks.draws, ranks.problem
        del ranks
    else:
        with trial.timed("recorded"):
            run = trial.run(trial.subject.call, name=trial.subject.address, **how)
        returned = run.outcomes
    if problem:
        trial.problems["masks"], truth, torn = problem, {}, True
    elif kinds or draws:
        merged = merged_outcomes(returned, masks, {} if draws else truth)
        truth, torn = _given(trial, kinds or GIVEN, merged)
    if run.problem:
        trial.problems["activations"] = run.problem
    captured = _captured(run.captured, masks, truth if own else None)
    compared = comparable(truth, returned)
    orders, model = orders_of(trial), trial.reference.model
    declared: tuple[str, ...] = asked(trial, "coverage", lambda: left_out(trial.subject), ())
    merged = merged_outcomes(returned, captured, truth)
    outcomes, captured = held_once(returned, merged), held_once(captured, merged)
    run = replace(run, outcomes=(), captured=())
    del returned
    give_back(merged.tensors.values())
    return Evidence(
        case=case,
        outcomes=outcomes,
        captured=captured,
        merged=merged,
        truth=compared,
        initial=trial.initial(compared),
        events=run.events,
        expectation=expectation,
        unwaited=run.unwaited,
        spans=run.spans,
        saved_bytes=run.saved_bytes,
        hidden=run.hidden,
        orders=orders,
        unread=model.unread_rows(case) if model else (),
        declared=declared,
        given=tuple(trial.given),
        deviations=deviations_of(trial) if any(kind_of(name) == "init" for name in merged.tensors) else {},
        mask_draws=drawn,
        torn=torn,
        deviates=deviates,
    )


def _captured(captured: Outcomes, masks: Outcomes, own: Mapping[str, Tensor] | None) -> Outcomes:
    """The activations and the masks of every rank; a truth of the subject's `own` knows only those that it returns."""
    if own is not None:
        captured = tuple({name: rank[name] for name in rank if name in own} for rank in captured)
    if not masks or not captured:
        return captured or masks
    return tuple({**a, **b} for a, b in zip(captured, masks, strict=True))


def _deviates(trial: Trial) -> "Deviations | None":
    """How the subject states that tensors deviate from the truth."""
    stated = deviating(trial.case, trial.subject)
    if not stated:
        return None
    from shardproof.harness.checking.measures.stated_deviations import Deviations  # noqa: PLC0415

    return Deviations(
        {pattern: its.sentence for pattern, its in stated.items()},
        frozenset(pattern for pattern, its in stated.items() if its.truth is not None),
    )


def _given(trial: Trial, kinds: Sequence[str], merged: Merged) -> tuple[Mapping[str, Tensor], bool]:
    """The truth computed from what the ranks drew, and whether there is none because those tensors do not merge.

    The truth is then what did merge.
    """
    trial.given.update({name: tensor for name, tensor in merged.tensors.items() if kind_of(name) in kinds})
    trial.known.clear()  # computed for other numbers than this run drew
    if any(kind_of(flaw.name) in kinds for flaw in merged.flaws):
        return dict(trial.given), True
    return {**trial.dense(trial.reference.truth), **trial.given}, False
