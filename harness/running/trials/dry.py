"""The evidence and findings of a case on ranks that have shapes and no numbers. Sizes are GiB in messages."""

from collections.abc import Sequence
from typing import cast

from shardproof.harness.checking.call_checks import check_order
from shardproof.harness.checking.checks import CHECKS, run_checks, select_checks_by_need
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.records import Calls, Claims, DryRun, Evidence, RecordedRun, Truth, merged_outcomes
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.ledger import Event
from shardproof.harness.predicting.dry_run import DryRank, dry_run, find_hidden_calls, representatives
from shardproof.harness.running.trials.runs import expectation_of, orders_of
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.verdicts.facts import Fact, Note, NoteKind, note_unchecked, state_fact


def check_dry_run(trial: Trial) -> tuple[Evidence, dict[str, Finding]]:
    """The evidence of one recorded run on a few ranks that represent all, and the findings that it allows.

    There is no truth, no outcome, no second run.
    """
    case, engine = trial.case, cast(DryEngine, trial.engine)
    ranks, places = representatives(case.axes, case.world_size)
    with trial.time_part("recorded"):
        run = dry_run(case, trial.subject.call, engine, ranks, text=trial.text, timeout_s=trial.timeout_s)
    calls = Calls(
        case=case,
        events=tuple(event for rank in run for event in rank.events),
        unwaited=tuple(_name_unwaited_call(rank, event) for rank in run for event in rank.unwaited),
        saved_bytes=tuple(rank.saved_bytes for rank in run),
        hidden=frozenset((rank.rank, ticket) for rank in run for ticket in find_hidden_calls(rank.stretches)),
        ran=ranks,
    )
    numbers = tuple(select_checks_by_need(CHECKS, RecordedRun, Truth))
    notes = (
        Note(kind=NoteKind.NOT_ANSWERED, names=numbers, reason="the dry engine has shapes and no numbers"),
        *note_unchecked(*_left_out(len(ranks), places, case.world_size)),
    )
    evidence = Evidence(
        run=RecordedRun(calls=calls, merged=merged_outcomes((), (), {})),
        claims=Claims(axes={**case.axes, **orders_of(trial)}, expectation=expectation_of(trial)),
        dry=DryRun(memory=_memory(run), notes=notes),
    )
    with trial.time_part("checks"):
        return evidence, run_checks(evidence, {**CHECKS, "order": check_order})


def _name_unwaited_call(rank: DryRank, event: Event) -> Unwaited:
    """The call as engines name it: its number among the calls of its rank and group."""
    before = [other for other in rank.events if other.axis == event.axis and other.call_index < event.call_index]
    return Unwaited(
        rank=rank.rank,
        op=event.op,
        number=sum(other.op not in ("send", "recv") for other in before),
        group=f"{event.axis} ({event.group_size} ranks)",
        caller=event.caller,
    )


def _memory(run: Sequence[DryRank]) -> Fact:
    fullest = max(run, key=lambda rank: rank.peak_bytes)
    parts = {
        "parameters": fullest.parameter_bytes,
        "gradients": fullest.gradient_bytes,
        "optimizer": fullest.optimizer_bytes,
        "saved for backward": fullest.saved_bytes,
        "all tensors at the peak": fullest.peak_bytes,
    }
    return state_fact("rank_holds", rank=fullest.rank, parts=list(parts.items()))


def _left_out(run: int, places: int, world_size: int) -> tuple[str, ...]:
    if run == world_size:
        return ()
    which = "one of every place on the mesh was" if run >= places else f"{run} of {places} places on the mesh were"
    return (f"{world_size - run} ranks: {which} run",)
