"""A case on ranks that have shapes and no numbers: its evidence, and the checks that it can answer.

Such are the checks of calls, and whether ranks of one group issue the same ones. Sizes are GiB in messages.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import cast

from harness.checking.call_checks import groups, overlap, waits
from harness.checking.checks import CHECKS, Check, examine
from harness.checking.evidence import PASS, Evidence, Finding, gathered
from harness.checking.laws import Broken, same_sequence
from harness.checking.ledger_checks import ledger, unlawful
from harness.engines.engine import Unwaited
from harness.engines.shapes.dry import DryEngine
from harness.errors import ranks_text
from harness.ledger import Event
from harness.predicting.dry_run import DryRank, dry_run, representatives
from harness.predicting.meter import hidden
from harness.protocols import Axes
from harness.running.trials.statements import expectation_of, orders_of
from harness.running.trials.trial import Trial
from harness.terms import key_of


def dry_run_checked(trial: Trial) -> tuple[Evidence, dict[str, Finding]]:
    """The evidence of one recorded run on the ranks that stand for all, and the findings that it allows.

    There is no truth, no outcome, no second run.
    """
    case, engine = trial.case, cast(DryEngine, trial.engine)
    ranks, places = representatives(case.axes, case.world_size)
    with trial.timed("recorded"):
        run = dry_run(case, trial.subject.call, engine, ranks, text=trial.text, timeout_s=trial.timeout_s)
    evidence = Evidence(
        case=case,
        merged=gathered((), (), {}),
        events=tuple(event for rank in run for event in rank.events),
        expectation=expectation_of(trial),
        unwaited=tuple(_unwaited(rank, event) for rank in run for event in rank.unwaited),
        saved_bytes=tuple(rank.saved_bytes for rank in run),
        ran=ranks,
        orders=orders_of(trial),
        hidden=frozenset((rank.rank, ticket) for rank in run for ticket in hidden(rank.stretches)),
        notes=(_memory(run), *_left_out(len(ranks), places, case.world_size)),
    )
    with trial.timed("checks"):
        return evidence, examine(evidence, DRY_CHECKS)


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


def _memory(run: Sequence[DryRank]) -> str:
    fullest = max(run, key=lambda rank: rank.peak_bytes)
    parts = {
        "parameters": fullest.parameter_bytes,
        "gradients": fullest.gradient_bytes,
        "optimizer": fullest.optimizer_bytes,
        "saved for backward": fullest.saved_bytes,
        "all tensors at the peak": fullest.peak_bytes,
    }
    sizes = ", ".join(f"{what} {size / 2**30:.3g}" for what, size in parts.items())
    return f"rank {fullest.rank} holds, in GiB: {sizes}"


def _left_out(run: int, places: int, world_size: int) -> tuple[str, ...]:
    if run == world_size:
        return ()
    which = "one of every place on the mesh was" if run >= places else f"{run} of {places} places on the mesh were"
    return (f"{world_size - run} ranks: {which} run",)


def order(evidence: Evidence) -> Finding:
    """Whether ranks that share a group issue the same calls in it in the same order, and which ranks are alike.

    A dry run computes no numbers: every check that it cannot answer is unchecked.
    """
    ordered = sorted(evidence.events, key=attrgetter("rank", "call_index"))
    by_rank = {rank: list(events) for rank, events in groupby(ordered, key=attrgetter("rank"))}
    if broken := _parted(by_rank, evidence.case.axes):
        return unlawful(broken)
    unchecked = tuple(f"{name}: the dry engine has shapes and no numbers" for name in CHECKS if name not in DRY_CHECKS)
    sequences: dict[tuple[str, ...], list[int]] = {}
    for rank, events in by_rank.items():
        sequences.setdefault(tuple(str(key_of(event)) for event in events), []).append(rank)
    alike = list(sequences.values()) or [list(evidence.ran)]
    classes = " | ".join(map(ranks_text, alike))
    ran = f"{len(evidence.ran)} of {evidence.case.world_size} ranks run"
    message = f"{ran}, in {len(alike)} class(es) of equal sequences: {classes}; " + "; ".join(evidence.notes[:1])
    return Finding(verdict=PASS, message=message, unchecked=(*unchecked, *evidence.notes[1:]))


DRY_CHECKS: Mapping[str, Check] = {
    "ledger": ledger,
    "groups": groups,
    "order": order,
    "waits": waits,
    "overlap": overlap,
}
"""Name -> check that a dry run can answer."""


def _parted(by_rank: Mapping[int, Sequence[Event]], axes: Axes) -> Broken | None:
    """Where ranks of one group that were run issue different calls in it, or in another order."""
    for axis, lists in axes.items():
        calls = {rank: [event for event in events if event.axis == axis] for rank, events in by_rank.items()}
        for ranks in lists:
            run = tuple(rank for rank in ranks if rank in by_rank)
            if len(run) > 1 and (broken := same_sequence(axis, run, calls)):
                return broken[0]
    return None
