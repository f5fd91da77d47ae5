"""What a dry run can prove: that the ledger is the expected one, and that ranks which meet say the same.

Numbers cannot be checked, for there are none: every verdict of a dry run says so. Sizes are GiB in messages.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.checking.checks import CHECKS, Check
from harness.checking.evidence import FAIL, PASS, Evidence, Finding, gathered
from harness.checking.exact_checks import waits
from harness.checking.group_checks import groups
from harness.checking.ledger_checks import ledger
from harness.checking.overlap_checks import overlap
from harness.engines.engine import Unwaited
from harness.engines.shapes.dry import DryEngine
from harness.errors import ranks_text
from harness.ledger import Event
from harness.merging import Outcomes
from harness.predicting.classes import parted, representatives, sequences
from harness.predicting.dry_run import DryRank, DryRun, dry_run
from harness.predicting.meter import hidden
from harness.running.trial import Trial, expectation_of, orders_of

__all__ = ["DRY_CHECKS", "dry_evidence"]

_NOBODY: Outcomes = ()


def dry_evidence(trial: Trial, engine: DryEngine) -> Evidence:
    """The evidence of one recorded run on the ranks that stand for all; no truth, no outcome, no second run."""
    case = trial.case
    ranks, places = representatives(case.axes, case.world_size)
    with trial.timed("recorded"):
        run = dry_run(case, trial.subject, engine, ranks, text=trial.text, timeout_s=trial.timeout_s)
    return Evidence(
        case=case,
        outcomes=_NOBODY,
        captured=_NOBODY,
        merged=gathered(_NOBODY, _NOBODY, {}),
        truth={},
        controls=(),
        events=run.events,
        expectation=expectation_of(trial),
        repeats=(),
        unwaited=tuple(_unwaited(rank, event) for rank in run.ranks for event in rank.unwaited),
        saved_bytes=tuple(rank.saved_bytes for rank in run.ranks),
        ran=ranks,
        orders=orders_of(trial),
        hidden=frozenset((rank.rank, ticket) for rank in run.ranks for ticket in hidden(rank.stretches)),
        notes=(_memory(run), *_left_out(len(ranks), places, case.world_size)),
    )


def order(evidence: Evidence) -> Finding:
    """Whether ranks that share a group issue the same calls in it in the same order, and which ranks are alike."""
    broken = parted(evidence.events, evidence.case.axes)
    unchecked = tuple(f"{name}: the dry engine has shapes and no numbers" for name in CHECKS if name not in DRY_CHECKS)
    if broken:
        first = broken[0]
        return Finding(verdict=FAIL, message=first.message, ranks=first.ranks, phase=first.phase, region=first.region)
    alike = sequences(evidence.events) or [evidence.ran]
    classes = " | ".join(ranks_text(ranks) for ranks in alike)
    said = f"{len(evidence.ran)} of {evidence.case.world_size} ranks run, in {len(alike)} class(es) of equal sequences"
    message = f"{said}: {classes}; " + "; ".join(evidence.notes[:1])
    return Finding(verdict=PASS, message=message, unchecked=(*unchecked, *evidence.notes[1:]))


DRY_CHECKS: Mapping[str, Check] = {
    "ledger": ledger,
    "groups": groups,
    "order": order,
    "waits": waits,
    "overlap": overlap,
}
"""Name -> check that a dry run can answer."""


def _unwaited(rank: DryRank, event: Event) -> Unwaited:
    """The call as engines tell of it: by its number among the rank's calls in its group."""
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
