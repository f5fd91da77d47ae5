"""The runs of one case, from which its evidence is made: the dense model, the subject recorded, the subject unwatched.

Watching (capturing activations) costs another run, so it is done only when a check or a diagnosis needs it. The dense
model is computed behind the ranks' runs where they do not need it, since both in float64 and in one process would fill
the memory. Times are seconds. Sizes of a dry run are GiB in messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from harness.checking.evidence import Evidence, gathered
from harness.checking.exact_checks import same_outcomes
from harness.checking.measures.kinds import is_state, kind_of
from harness.checking.measures.stated_deviations import Deviations
from harness.engines.engine import Unwaited
from harness.engines.shapes.dry import DryEngine
from harness.errors import ShardproofError, error_text
from harness.ledger import Event
from harness.outcome.merging import Merged, Outcomes, against, held_once
from harness.predicting.classes import representatives
from harness.predicting.dry_run import DryRank, DryRun, dry_run
from harness.predicting.meter import hidden
from harness.protocols import CaseLike
from harness.recording.capturing.dropout_masks import WithMasks
from harness.running.ranks.execution import execute_captured
from harness.running.trials.trial import Trial, asked, expectation_of, facts_of, orders_of
from harness.running.truth.joint_masks import masks_of
from harness.running.truth.reference import OwnTruth, draws_of
from harness.subject import deviating, deviations, left_out, refusal
from harness.torch_internals.memory import give_back

GIVEN = "mask", "init"
"""The kinds of names that a truth of the subject's own may take as given."""


def recorded(trial: Trial, *, watch: bool = False) -> Evidence:
    """The evidence of one recorded run beside the dense model, without control runs; with `watch` as `watched` has it,
    else nothing is captured or repeated.

    Raises RequestError when the dense model cannot be computed, and what the engine raises.
    """
    truth = trial.reference.truth
    kinds = _kinds(trial)
    if kinds or isinstance(truth, OwnTruth):  # it is given what ranks drew, or they are given what it drew
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
    truth, model = trial.reference.truth, trial.reference.model
    if isinstance(truth, OwnTruth) and truth.takes_given:
        return GIVEN
    return model.given_kinds(trial.case) if model else ()


def _asked_for(outcomes: Outcomes, truth: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The truth, without states where no rank returned any."""
    if any(is_state(name) for outcome in outcomes for name in outcome):
        return truth
    return {name: tensor for name, tensor in truth.items() if not is_state(name)}


def _recorded(trial: Trial, truth: Mapping[str, Tensor], kinds: Sequence[str]) -> Evidence:
    """The evidence of one recorded run beside this truth, or beside one that is given these kinds of its names."""
    case, names, torn = trial.case, trial.reference, False
    draws = draws_of(names.truth, trial.text)
    with trial.timed("recorded"):
        call, name = (WithMasks(trial.subject), "") if draws else (trial.subject.call, trial.subject.address)
        run = trial.run(call, record=True, name=name)
    ranks = masks_of(case, {**case.axes, **orders_of(trial)}, draws, run.outcomes)
    if ranks.problem:
        trial.problems["masks"], truth, torn = ranks.problem, {}, True
    elif kinds or draws:
        merged = gathered(ranks.outcomes, ranks.masks, {} if draws else truth)
        truth, torn = _given(trial, kinds or GIVEN, merged)
    merged = gathered(ranks.outcomes, ranks.masks, truth)
    outcomes, events, unwaited, spans = held_once(ranks.outcomes, merged), run.events, run.unwaited, run.spans
    masks, drawn, stated = ranks.masks, ranks.draws, deviating(case, trial.subject)
    del run, ranks
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
    if isinstance(trial.reference.truth, OwnTruth):  # it knows no modules, unless it returns their tensors by name
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


def explained(trial: Trial, evidence: Evidence, wrong: Collection[str]) -> Evidence:
    """The same evidence with what explains these wrong names: gradients taken apart, data read otherwise."""
    kinds, model = {kind_of(name) for name in wrong}, trial.reference.model
    if model is None:
        return evidence
    shares: Mapping[str, Tensor] = {}
    what_if: dict[str, Tensor] = {}
    try:
        if kinds & {"grad", "param", "param_after", "exp_avg_after", "grad_norm", "tokens", "act", "loss"}:
            shares = trial.dense(model.shares, part="explained")
        if kinds & {"act", "logits", "loss", "grad"}:
            what_if |= trial.dense(model.alternatives, part="explained")
        if "act" in kinds:
            what_if |= trial.dense(model.rules, part="explained")
        for kind, function in (("metric", model.metrics), ("param", model.trainings)):
            what_if |= trial.dense(function, part="explained") if kind in kinds else {}
    except Exception as problem:  # the failure stands; less of it is explained, and that is said
        trial.problems["explanation"] = f"the dense model raised while a cause was looked for: {error_text(problem)}"
    return replace(evidence, shares=shares, alternatives=what_if)


def elsewhere(trial: Trial, case: CaseLike, first: str) -> Evidence | None:
    """Evidence of the same subject in another case, as far as this tensor needs it; None when there is none."""
    other = replace(trial, case=case, seconds={}, problems={}, known={}, facts=[], given={})
    try:
        if refusal(case, trial.subject):
            return None
        with trial.timed("elsewhere"):
            seen = recorded(other)
            if kind_of(first) in ("act", "act_grad"):
                seen = watched(other, seen)
            return replace(seen, shares=other.dense(model.shares) if (model := trial.reference.model) else {})
    except Exception:  # then this case decides nothing
        return None


def dry_evidence(trial: Trial, engine: DryEngine) -> Evidence:
    """The evidence of one recorded run on the ranks that stand for all; no truth, no outcome, no second run."""
    case = trial.case
    ranks, places = representatives(case.axes, case.world_size)
    with trial.timed("recorded"):
        run = dry_run(case, trial.subject.call, engine, ranks, text=trial.text, timeout_s=trial.timeout_s)
    return Evidence(
        case=case,
        merged=gathered((), (), {}),
        events=run.events,
        expectation=expectation_of(trial),
        unwaited=tuple(_unwaited(rank, event) for rank in run.ranks for event in rank.unwaited),
        saved_bytes=tuple(rank.saved_bytes for rank in run.ranks),
        ran=ranks,
        orders=orders_of(trial),
        hidden=frozenset((rank.rank, ticket) for rank in run.ranks for ticket in hidden(rank.stretches)),
        notes=(_memory(run), *_left_out(len(ranks), places, case.world_size)),
    )


def _unwaited(rank: DryRank, event: Event) -> Unwaited:
    """The call as engines name it: by its number among the rank's calls in its group."""
    before = [other for other in rank.events if other.axis == event.axis and other.call_index < event.call_index]
    return Unwaited(
        rank=rank.rank,
        op=event.op,
        number=sum(other.op not in ("send", "recv") for other in before),
        group=f"{event.axis} ({event.group_size} ranks)",
        caller=event.caller,
    )


def _memory(run: DryRun) -> str:
    fullest = max(run.ranks, key=lambda rank: rank.peak_bytes)
    parts = {
        "parameters": fullest.parameter_bytes,
        "gradients": fullest.gradient_bytes,
        "optimizer": fullest.optimizer_bytes,
        "saved for backward": fullest.saved_bytes,
        "all tensors at the peak": fullest.peak_bytes,
    }
    return f"rank {fullest.rank} holds, in GiB: " + ", ".join(
        f"{what} {size / 2**30:.3g}" for what, size in parts.items()
    )


def _left_out(run: int, places: int, world_size: int) -> tuple[str, ...]:
    if run == world_size:
        return ()
    if run >= places:
        return (f"{world_size - run} ranks: one of every place on the mesh was run",)
    return (f"{world_size - run} ranks: {run} of {places} places on the mesh were run",)
