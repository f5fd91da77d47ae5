"""The runs of one case, from which its evidence is made: the dense model, the subject recorded, the subject unwatched.

Watching (capturing activations) costs another run, so it is done only when a check or a diagnosis needs it. The dense
model is computed behind the ranks' runs where they do not need it, since both in float64 and in one process would fill
the memory. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from harness.checking.evidence import Evidence, gathered
from harness.checking.measures.kinds import is_state, kind_of
from harness.checking.measures.stated_deviations import Deviations
from harness.checking.repeats import same_outcomes
from harness.errors import ShardproofError
from harness.outcome.merging import Merged, Outcomes, against, held_once
from harness.running.ranks.execution import execute_captured
from harness.running.trials.trial import Trial, asked, expectation_of, facts_of, orders_of
from harness.subject import deviating, deviations, left_out
from harness.torch_internals.memory import give_back

GIVEN = "mask", "init"
"""The kinds of names that a truth of the subject's own may take as given."""


def recorded(trial: Trial, *, watch: bool = False) -> Evidence:
    """The evidence of one recorded run beside the dense model, without control runs; with `watch` as `watched` has it,
    else nothing is captured or repeated.

    Raises RequestError when the dense model cannot be computed, and what the engine raises.
    """
    kinds = _kinds(trial)
    if kinds or trial.reference.own:  # it is given what ranks drew, or they are given what it drew
        evidence = _recorded(trial, {} if kinds else trial.true(), kinds)
        return watched(trial, evidence) if watch else evidence
    try:
        evidence = _recorded(trial, {}, ())
        evidence = watched(trial, evidence) if watch else evidence
    except ShardproofError:
        trial.true()  # a case that the dense model refuses is refused, whatever its ranks do
        raise
    true = trial.true()
    return replace(evidence, merged=against(evidence.merged, true), truth=_asked_for(evidence.outcomes, true))


def _kinds(trial: Trial) -> tuple[str, ...]:
    """The kinds of names in the outcome that the truth must be given."""
    own, model = trial.reference.own, trial.reference.model
    if own and own.takes_given:
        return GIVEN
    return model.given_kinds(trial.case) if model else ()


def _asked_for(outcomes: Outcomes, truth: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The truth, without states where no rank returned any."""
    if any(is_state(name) for outcome in outcomes for name in outcome):
        return truth
    return {name: tensor for name, tensor in truth.items() if not is_state(name)}


def _recorded(trial: Trial, truth: Mapping[str, Tensor], kinds: Sequence[str]) -> Evidence:
    """The evidence of one recorded run beside this truth, or beside one that is given these kinds of its names."""
    case, own, torn = trial.case, trial.reference.own, False
    draws = own.draws.get(trial.text, ()) if own and not own.takes_given else ()
    masks: Outcomes = ()
    drawn, problem = None, ""
    if draws:
        from harness.recording.capturing.dropout_masks import WithMasks  # noqa: PLC0415
        from harness.running.truth.joint_masks import masks_of  # noqa: PLC0415

        with trial.timed("recorded"):
            run = trial.run(WithMasks(trial.subject), record=True)
        ranks = masks_of(case, {**case.axes, **orders_of(trial)}, draws, run.outcomes)
        returned, masks, drawn, problem = ranks.outcomes, ranks.masks, ranks.draws, ranks.problem
        del ranks
    else:
        with trial.timed("recorded"):
            run = trial.run(trial.subject.call, record=True, name=trial.subject.address)
        returned = run.outcomes
    if problem:
        trial.problems["masks"], truth, torn = problem, {}, True
    elif kinds or draws:
        merged = gathered(returned, masks, {} if draws else truth)
        truth, torn = _given(trial, kinds or GIVEN, merged)
    merged = gathered(returned, masks, truth)
    outcomes, events, unwaited, spans = held_once(returned, merged), run.events, run.unwaited, run.spans
    stated = deviating(case, trial.subject)
    del run, returned
    give_back(merged.tensors.values())
    return Evidence(
        case=case,
        outcomes=outcomes,
        captured=masks,
        merged=merged,
        truth=_asked_for(outcomes, truth),
        events=events,
        expectation=expectation_of(trial),
        unwaited=unwaited,
        spans=spans,
        orders=orders_of(trial),
        facts=facts_of(trial),
        declared=asked(trial, "coverage", lambda: left_out(trial.subject), ()),
        given=tuple(trial.given),
        deviations=_deviations(trial, merged),
        mask_draws=drawn,
        torn=torn,
        deviates=Deviations(
            {pattern: one.sentence for pattern, one in stated.items()},
            frozenset(pattern for pattern, one in stated.items() if one.truth is not None),
        ),
    )


def _deviations(trial: Trial, merged: Merged) -> Mapping[str, float]:
    """What the subject, or else the reference, states of initial values, where the subject returned any."""
    if not any(kind_of(name) == "init" for name in merged.tensors):
        return {}
    none: Mapping[str, float] = {}
    own = asked(trial, "initial_values", lambda: deviations(trial.case, trial.subject.call), none)
    model = trial.reference.model
    return own or (model.initial_deviations(trial.case) if model else {})


def _given(trial: Trial, kinds: Sequence[str], merged: Merged) -> tuple[Mapping[str, Tensor], bool]:
    """The truth of what the subject drew, and whether there is none: where its replicas or shards of that do not make
    one tensor, no dense model can be given it, and the truth is just what did merge.
    """
    trial.given.update({name: tensor for name, tensor in merged.tensors.items() if kind_of(name) in kinds})
    trial.known.clear()  # trials of other subjects drew other numbers
    if any(kind_of(flaw.name) in kinds for flaw in merged.flaws):
        return dict(trial.given), True
    return {**trial.dense(trial.reference.truth), **trial.given}, False


def watched(trial: Trial, evidence: Evidence) -> Evidence:
    """The same evidence with an unrecorded run beside it: activations captured, outcomes to compare bit for bit."""
    case = trial.case
    with trial.timed("plain"):
        plain = execute_captured(
            case,
            trial.subject.call,
            trial.engine,
            device=trial.device,
            timeout_s=trial.timeout_s,
            name=trial.subject.address,
            overlap=any(getattr(term, "hidden", False) for term in evidence.expectation or ()),
        )
    if plain.problem:
        trial.problems["activations"] = plain.problem
    repeats = [evidence.outcomes]  # rather than the same once more
    if not same_outcomes(evidence.outcomes, plain.outcomes):
        repeats = [plain.outcomes]
        with trial.timed("again"):  # tells a subject that is not deterministic from a recording that disturbs it
            again = trial.run(trial.subject.call, name=trial.subject.address)
        repeats.append(again.outcomes)
    captured: Outcomes = plain.captured
    if trial.reference.own:  # it knows no modules, unless it returns their tensors by name
        captured = tuple({name: found[name] for name in found if name in evidence.truth} for found in captured)
    if evidence.captured:  # masks
        captured = tuple({**a, **b} for a, b in zip(captured or evidence.captured, evidence.captured, strict=True))
    merged = gathered(evidence.outcomes, captured, evidence.truth, evidence.merged.tensors)
    watched_too = replace(
        evidence,
        captured=held_once(captured, merged),
        merged=merged,
        repeats=tuple(repeats),
        saved_bytes=plain.saved_bytes,
        hidden=plain.hidden,
    )
    del plain, captured
    give_back(merged.tensors.values())
    return watched_too
