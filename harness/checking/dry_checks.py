"""The checks that a dry run can answer: those of calls, and whether ranks of one group issue the same ones."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from shardproof.harness.checking.call_checks import groups, overlap, waits
from shardproof.harness.checking.checks import CHECKS, Check
from shardproof.harness.checking.evidence import PASS, Evidence, Finding
from shardproof.harness.checking.laws import Broken, same_sequence
from shardproof.harness.checking.ledger_checks import ledger, unlawful
from shardproof.harness.errors import ranks_text
from shardproof.harness.ledger import Event
from shardproof.harness.protocols import Axes
from shardproof.harness.terms import key_of


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
