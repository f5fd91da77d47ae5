"""The checks that a dry run can answer: those of calls, and whether ranks of one group issue the same ones."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from harness.checking.call_checks import groups, overlap, waits
from harness.checking.checks import CHECKS, Check
from harness.checking.evidence import PASS, Evidence, Finding
from harness.checking.laws import Broken, same_sequence
from harness.checking.ledger_checks import ledger, unlawful
from harness.errors import ranks_text
from harness.ledger import Event
from harness.protocols import Axes
from harness.terms import key_of


def order(evidence: Evidence) -> Finding:
    """Whether ranks that share a group issue the same calls in it in the same order, and which ranks are alike.

    A dry run computes no numbers: every check that it cannot answer is unchecked.
    """
    broken = _parted(evidence.events, evidence.case.axes)
    unchecked = tuple(f"{name}: the dry engine has shapes and no numbers" for name in CHECKS if name not in DRY_CHECKS)
    if broken:
        return unlawful(broken[0])
    alike = _sequences(evidence.events) or [evidence.ran]
    classes = " | ".join(ranks_text(ranks) for ranks in alike)
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


def _parted(events: Iterable[Event], axes: Axes) -> list[Broken]:
    """Where ranks of one group that were run issue different calls in it, or in another order."""
    by_rank = _by_rank(events)
    broken = []
    for axis, lists in axes.items():
        calls = {rank: [event for event in mine if event.axis == axis] for rank, mine in by_rank.items()}
        for ranks in lists:
            run = tuple(rank for rank in ranks if rank in by_rank)
            if len(run) > 1:
                broken += same_sequence(axis, run, calls)
    return broken


def _sequences(events: Iterable[Event]) -> list[tuple[int, ...]]:
    """The ranks that were run, those together that issue the same calls in the same order, by their lowest rank."""
    classes: dict[tuple[object, ...], list[int]] = {}
    for rank, mine in _by_rank(events).items():
        calls = tuple(str(key_of(event)) for event in mine)
        classes.setdefault(calls, []).append(rank)
    return [tuple(ranks) for ranks in classes.values()]


def _by_rank(events: Iterable[Event]) -> dict[int, Sequence[Event]]:
    ordered = sorted(events, key=attrgetter("rank", "call_index"))
    return {rank: list(mine) for rank, mine in groupby(ordered, key=attrgetter("rank"))}
