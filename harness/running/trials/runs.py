"""The runs of one case, from which its evidence is made: the dense model, the subject recorded, the subject unrecorded.

The dense model is computed behind the ranks' runs where they do not need it. Both in float64 and in one process would
fill the memory. Times are seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from harness.checking.evidence import Evidence, gathered
from harness.checking.measures.kinds import comparable, kind_of
from harness.checking.repeats import same_outcomes
from harness.errors import ShardproofError
from harness.outcome.merging import Merged, Outcomes, against, held_once
from harness.running.trials.trial import Trial, asked, deviations_of, expectation_of, facts_of, orders_of
from harness.subject import deviating, left_out
from harness.torch_internals.memory import give_back

if TYPE_CHECKING:
    from harness.checking.measures.stated_deviations import Deviations

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
    return replace(evidence, merged=against(evidence.merged, true), truth=comparable(true, evidence.outcomes))


def _kinds(trial: Trial) -> tuple[str, ...]:
    """The kinds of names in the outcome that the truth must be given."""
    own, model = trial.reference.own, trial.reference.model
    if own and own.takes_given:
        return GIVEN
    return model.given_kinds(trial.case) if model else ()


def _recorded(trial: Trial, truth: Mapping[str, Tensor], kinds: Sequence[str]) -> Evidence:
    """The evidence of one recorded run beside this truth, or beside one that is given these kinds of its names."""
    case, own, torn = trial.case, trial.reference.own, False
    draws = own.draws.get(trial.text, ()) if own and not own.takes_given else ()
    masks: Outcomes = ()
    deviates = _deviates(trial)
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
    compared = comparable(truth, returned)
    expectation, orders, facts = expectation_of(trial), orders_of(trial), facts_of(trial)
    declared: tuple[str, ...] = asked(trial, "coverage", lambda: left_out(trial.subject), ())
    merged = gathered(returned, masks, truth)
    outcomes, events, unwaited, spans = held_once(returned, merged), run.events, run.unwaited, run.spans
    del run, returned
    give_back(merged.tensors.values())
    return Evidence(
        case=case,
        outcomes=outcomes,
        captured=masks,
        merged=merged,
        truth=compared,
        events=events,
        expectation=expectation,
        unwaited=unwaited,
        spans=spans,
        orders=orders,
        facts=facts,
        declared=declared,
        given=tuple(trial.given),
        deviations=deviations_of(trial) if any(kind_of(name) == "init" for name in merged.tensors) else {},
        mask_draws=drawn,
        torn=torn,
        deviates=deviates,
    )


def _deviates(trial: Trial) -> "Deviations | None":
    """How the subject states that tensors deviate from the truth."""
    stated = deviating(trial.case, trial.subject)
    if not stated:
        return None
    from harness.checking.measures.stated_deviations import Deviations  # noqa: PLC0415

    return Deviations(
        {pattern: its.sentence for pattern, its in stated.items()},
        frozenset(pattern for pattern, its in stated.items() if its.truth is not None),
    )


def _given(trial: Trial, kinds: Sequence[str], merged: Merged) -> tuple[Mapping[str, Tensor], bool]:
    """The truth of what the subject drew, and whether there is none.

    Where replicas or shards do not make one tensor, no dense model can be given it. The truth is then what did merge.
    """
    trial.given.update({name: tensor for name, tensor in merged.tensors.items() if kind_of(name) in kinds})
    trial.known.clear()  # trials of other subjects drew other numbers
    if any(kind_of(flaw.name) in kinds for flaw in merged.flaws):
        return dict(trial.given), True
    return {**trial.dense(trial.reference.truth), **trial.given}, False


def watched(trial: Trial, evidence: Evidence) -> Evidence:
    """Evidence with an unrecorded run beside it: activations captured, outcomes to compare bit for bit."""
    overlap = any(getattr(term, "hidden", False) for term in evidence.expectation or ())
    with trial.timed("plain"):
        plain = trial.run(trial.subject.call, watch=True, overlap=overlap, name=trial.subject.address)
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
        captured = tuple({name: rank[name] for name in rank if name in evidence.truth} for rank in captured)
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
