"""All checks of a case, in one table, and the one function that runs them.

A check is a pure function of the evidence; None means that there is nothing to check (the subject returned nothing of
the kind), and then no verdict is claimed. An exception inside a check is `unknown` with its text, never a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from harness.checking.coverage import coverage
from harness.checking.data_checks import data, initial_values, masks, regrouping, routing, tokens, truth
from harness.checking.evidence import PASS, UNKNOWN, Evidence, Finding
from harness.checking.exact_checks import determinism, layout, parallelism, recording, replicas, saved
from harness.checking.laws import Broken, same_sequence
from harness.checking.ledger_checks import groups, ledger, overlap, unlawful, waits
from harness.checking.numeric_checks import NUMERIC_KINDS, numeric
from harness.errors import error_text, ranks_text
from harness.ledger import Event
from harness.protocols import Axes
from harness.terms import key_of

Check = Callable[[Evidence], Finding | None]


CHECKS: Mapping[str, Check] = {
    "coverage": coverage,
    "data": data,
    "merge": layout,
    "replicas": replicas,
    **{name: numeric(name) for name in NUMERIC_KINDS},
    "initial_values": initial_values,
    "masks": masks,
    "tokens": tokens,
    "routing": routing,
    "saved": saved,
    "ledger": ledger,
    "groups": groups,
    "waits": waits,
    "overlap": overlap,
    "parallelism": parallelism,
    "determinism": determinism,
    "recording": recording,
}
"""Name -> check. Layouts come before numbers, numbers in the order in which training computes them. A name that stands
twice keeps its first place."""


LAWS: Mapping[str, Check] = {"truth": truth, "regrouping": regrouping}
"""Checks of a subject with a truth of its own: of that truth, and of other groupings of the batch, which need none."""


def examine(evidence: Evidence, checks: Mapping[str, Check] = CHECKS) -> dict[str, Finding]:
    """The findings of every check that applied, by its name."""
    findings: dict[str, Finding] = {}
    for name, check in checks.items():
        try:
            finding = check(evidence)
        except Exception as problem:  # a broken check must not hide the others, and is no verdict on the subject
            text = f"the check itself failed: {error_text(problem)}"
            finding = Finding(verdict=UNKNOWN, message=text, unchecked=(f"everything that {name} looks at",))
        if finding is not None:
            findings[name] = finding
    return findings


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
        said = tuple(str(key_of(event)) for event in mine)
        classes.setdefault(said, []).append(rank)
    return [tuple(ranks) for ranks in classes.values()]


def _by_rank(events: Iterable[Event]) -> dict[int, Sequence[Event]]:
    ordered = sorted(events, key=attrgetter("rank", "call_index"))
    return {rank: list(mine) for rank, mine in groupby(ordered, key=attrgetter("rank"))}
