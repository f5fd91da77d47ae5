"""The check that a case ran in parallel at all: every rank talks, and ranks hold parts."""

from __future__ import annotations

from collections.abc import Sequence

from harness.checking.evidence import FAIL, PASS, Evidence, Finding
from harness.mesh_axes import split_axes
from harness.outcome.blocks import Block
from harness.outcome.merging import Outcomes
from harness.protocols import CaseLike

SPLIT = " % of the parameters are split"
"""What follows the share of the parameters that is split in the message of `parallelism`."""


def parallelism(evidence: Evidence) -> Finding | None:
    """Whether the case really ran in parallel: every rank talked, and ranks hold less than the full tensors.

    Guards against a split that splits nothing: every number is right then, and nothing is parallel (ColossalAI #5903).
    """
    split = split_axes(evidence.case)
    if not split or not (evidence.events or any(evidence.outcomes)):  # nothing at all came: coverage says so
        return None
    talked = {event.rank for event in evidence.events if event.group_size > 1 and event.op != "barrier"}
    silent = tuple(rank for rank in range(len(evidence.outcomes)) if rank not in talked)
    terms = evidence.expectation
    silence_expected = terms is not None and all(term.group_size == 1 or term.calls == 0 for term in terms)
    if silent and not silence_expected:
        whom = "no rank" if not talked else f"not rank {', '.join(map(str, silent))}"
        message = f"{whom} sent or received anything in a mesh of " + _mesh(split)
        return Finding(verdict=FAIL, message=message, ranks=silent if talked else ())
    sharded = _sharded(evidence.outcomes)
    whole = f"{len(talked)} of {len(evidence.outcomes)} ranks talk over " + _mesh(split)
    share = split_share(evidence.outcomes)
    parameters = f"; {share}{SPLIT}" if share else ""
    if _weight_axis(evidence.case) not in split:
        return Finding(verdict=PASS, message=f"{whole}; no axis of it splits weights{parameters}")
    if not sharded:
        return Finding(verdict=PASS, message=whole, unchecked=("local shapes: every tensor was returned in full",))
    if not any(sharded.values()):
        message = f"every rank holds the full tensor of all {len(sharded)} shards in a mesh of " + _mesh(split)
        return Finding(verdict=FAIL, message=message, names=tuple(sharded))
    smaller = sum(sharded.values())
    words = f"{smaller} of {len(sharded)} sharded tensors are smaller on a rank"
    return Finding(verdict=PASS, message=f"{whole}; {words}{parameters}")


def split_share(outcomes: Outcomes) -> int | None:
    """How many of 100 elements of the parameters belong to one that some rank does not hold in full, rounded down but
    not to 0. Parameters are those returned as param/, else as grad/; None where none of them is returned as a part.
    """
    for kind in ("param/", "grad/"):
        names = dict.fromkeys(name for outcome in outcomes for name in outcome if name.startswith(kind))
        blocks = {name: [list(outcome.get(name, ())) for outcome in outcomes] for name in names}
        shapes = {name: part.global_shape for name, ranks in blocks.items() for parts in ranks for part in parts}
        if shapes:
            whole = all(part.whole for ranks in blocks.values() for parts in ranks for part in parts)
            split = [name for name in shapes if any(_elements(parts) < _numel(shapes[name]) for parts in blocks[name])]
            share = sum(_numel(shapes[name]) for name in split) / max(1, sum(map(_numel, shapes.values())))
            return None if whole else max(int(100 * share), int(bool(split)))
    return None


def _elements(parts: Sequence[Block]) -> int:
    return sum(part.local.numel() for part in parts)


def _weight_axis(case: CaseLike) -> str:
    """The axis over which weights are split, so that some tensor is smaller on a rank: where a mesh has `wp`, its `tp`
    splits the sequence alone.
    """
    return "wp" if "wp" in case.axes else "tp"


def _sharded(outcomes: Outcomes) -> dict[str, bool]:
    """Names returned as shards -> whether every rank holds less than the full tensor."""
    smaller: dict[str, bool] = {}
    for outcome in outcomes:
        for name, parts in outcome.items():
            if parts and not all(part.whole for part in parts):
                less = _elements(parts) < _numel(parts[0].global_shape)
                smaller[name] = smaller.get(name, True) and less
    return smaller


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _mesh(split: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in split.items())
