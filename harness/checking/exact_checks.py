"""Checks that compare bits and layouts: merging, replicas, checkpoints, determinism, recording, parallelism at all.

No tolerance anywhere: layouts are exact, replicas and repeated runs must agree in every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from harness.checking.evidence import FAIL, PASS, UNKNOWN, Evidence, Finding
from harness.checking.measures.kinds import kind_of
from harness.mesh_axes import split_axes
from harness.outcome.blocks import Block
from harness.outcome.merging import Flaw, Outcomes, differing, same_bits
from harness.protocols import CaseLike

SPLIT = " % of the parameters are split"
"""What follows the share of the parameters that is split in the message of `parallelism`."""

_COUNTS = ("steps", "step_after", "loss_scale")
"""Kinds of saved/ that are counts."""


def layout(evidence: Evidence) -> Finding | None:
    """Whether the blocks of every name make one full tensor of the truth's shape: nothing missing, nothing twice."""
    return _flaws(
        evidence, [flaw for flaw in evidence.merged.flaws if flaw.kind != "replica conflict"], "tensors merge"
    )


def replicas(evidence: Evidence) -> Finding | None:
    """Whether everything that several ranks hold is the same on all of them, bit for bit; choices of experts are the
    check `routing`.
    """
    conflicts = [
        flaw for flaw in evidence.merged.flaws if flaw.kind == "replica conflict" and kind_of(flaw.name) != "routing"
    ]
    return _flaws(evidence, conflicts, "tensors have equal replicas")


def _flaws(evidence: Evidence, flaws: list[Flaw], praise: str) -> Finding | None:
    names = evidence.returned
    if not names:
        return None
    other = tuple(flaw.name for flaw in evidence.merged.flaws if flaw not in flaws)
    if not flaws:
        return Finding(verdict=PASS, message=f"{len(names) - len(other)} {praise}", unchecked=other)
    first = flaws[0]
    return Finding(
        verdict=FAIL,
        message=f"{first.name} has a flaw, {first.kind}: {first.message}",
        unchecked=other,
        names=tuple(flaw.name for flaw in flaws),
        ranks=first.ranks,
    )


def determinism(evidence: Evidence) -> Finding | None:
    """Whether two runs of the case give the same bits on every rank.

    When the recorded run differs from an unrecorded one, two unrecorded runs decide between this check and `recording`.
    """
    return _repeated(evidence, blame_recording=False, praise="runs agree in every bit")


def recording(evidence: Evidence) -> Finding | None:
    """Whether the recorded run gives the same bits as an unrecorded one."""
    return _repeated(evidence, blame_recording=True, praise="recording changes no bit")


def _repeated(evidence: Evidence, *, blame_recording: bool, praise: str) -> Finding | None:
    if not evidence.repeats:
        return None
    plain, *again = evidence.repeats
    difference = _first_difference(evidence.outcomes, plain)
    steady = bool(again) and all(_first_difference(plain, other) is None for other in again)
    if difference is None or steady != blame_recording:
        return Finding(verdict=PASS, message=f"{1 + len(evidence.repeats)} runs: {praise}")
    name, rank, how = difference
    who = "the recorded run and an unrecorded one" if blame_recording else "two runs of the same case"
    message = f"{name} on rank {rank} differs between {who}: {how}"
    return Finding(verdict=FAIL, message=message, names=(name,), ranks=(rank,))


def same_outcomes(first: Outcomes, second: Outcomes) -> bool:
    """Whether two runs returned the same bits under the same names on every rank."""
    return _first_difference(first, second) is None


def _first_difference(first: Outcomes, second: Outcomes) -> tuple[str, int, str] | None:
    """Name, rank and words of the first value that two runs do not share."""
    for rank, (mine, theirs) in enumerate(zip(first, second, strict=True)):
        for name in dict.fromkeys([*mine, *theirs]):
            if name not in mine or name not in theirs:
                return name, rank, "only one of the runs returned it"
            for a, b in _pairs(mine[name], theirs[name]):
                if a is None or b is None or a.offsets != b.offsets:
                    return name, rank, "its blocks lie in other places"
                if not same_bits(a.local, b.local):
                    return name, rank, differing(a.local, b.local)
    return None


def _pairs(mine: Sequence[Block], theirs: Sequence[Block]) -> Iterator[tuple[Block | None, Block | None]]:
    for i in range(max(len(mine), len(theirs))):
        yield (mine[i] if i < len(mine) else None), (theirs[i] if i < len(theirs) else None)


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
    told = f"; {share}{SPLIT}" if share else ""
    if _weight_axis(evidence.case) not in split:
        return Finding(verdict=PASS, message=f"{whole}; no axis of it splits weights{told}")
    if not sharded:
        return Finding(verdict=PASS, message=whole, unchecked=("local shapes: every tensor was returned in full",))
    if not any(sharded.values()):
        message = f"every rank holds the full tensor of all {len(sharded)} shards in a mesh of " + _mesh(split)
        return Finding(verdict=FAIL, message=message, names=tuple(sharded))
    smaller = sum(sharded.values())
    words = f"{smaller} of {len(sharded)} sharded tensors are smaller on a rank"
    return Finding(verdict=PASS, message=f"{whole}; {words}{told}")


def split_share(outcomes: Outcomes) -> int | None:
    """How many of 100 elements of the parameters belong to one that some rank does not hold in full, rounded down but
    not to 0. Parameters are those returned as param/, else as grad/; None where none of them is returned as a part.
    """
    for kind in ("param/", "grad/"):
        names = dict.fromkeys(name for outcome in outcomes for name in outcome if name.startswith(kind))
        held = {name: [list(outcome.get(name, ())) for outcome in outcomes] for name in names}
        shapes = {name: part.global_shape for name, ranks in held.items() for parts in ranks for part in parts}
        if shapes:
            whole = all(part.whole for ranks in held.values() for parts in ranks for part in parts)
            split = [name for name in shapes if any(_held(parts) < _numel(shapes[name]) for parts in held[name])]
            share = sum(_numel(shapes[name]) for name in split) / max(1, sum(map(_numel, shapes.values())))
            return None if whole else max(int(100 * share), int(bool(split)))
    return None


def _held(parts: Sequence[Block]) -> int:
    return sum(part.local.numel() for part in parts)


def _weight_axis(case: CaseLike) -> str:
    """The axis over which weights are split, so that some tensor is smaller on a rank: where a mesh has `wp`, its `tp`
    splits the sequence alone.
    """
    return "wp" if "wp" in case.axes else "tp"


def saved(evidence: Evidence) -> Finding | None:
    """Whether the files of a checkpoint hold (`saved/<name>`), bit for bit, what the ranks hold under that name.

    They are full tensors, read by another reader than the one that loads them where there is one. What ranks hold is
    merged from their own shards and held against the dense model by `update`, so a save in a wrong order is seen where
    it is written, though a load that reads it alike would undo it. Counts that ranks do not return (steps, the state
    of the loss scale) are held against the truth, which rounding does not change.
    """
    names = [name for name in evidence.returned if kind_of(name) == "saved"]
    if not names:
        return None
    ordered = [name for name in evidence.truth if name in names] or sorted(names)
    merged = evidence.merged.tensors
    held = {name: merged.get(name.partition("/")[2], _counted(evidence, name)) for name in ordered}
    known = {name: (merged[name], right) for name, right in held.items() if right is not None and name in merged}
    unseen = tuple(name for name in ordered if name not in known)
    wrong = [name for name, (files, right) in known.items() if not same_bits(files, right)]
    if wrong:
        files, right = known[wrong[0]]
        whose = "the ranks" if wrong[0].partition("/")[2] in merged else "the truth"
        message = f"{wrong[0]}: the files of the checkpoint and {whose} differ {differing(files, right)}"
        return Finding(verdict=FAIL, message=message, unchecked=unseen, names=tuple(wrong))
    if not known:
        return Finding(verdict=UNKNOWN, message="the ranks returned nothing that was saved", unchecked=unseen)
    message = f"{len(known)} tensors of the checkpoint are those of the ranks in every bit"
    return Finding(verdict=PASS, message=message, unchecked=unseen)


def _counted(evidence: Evidence, name: str) -> Tensor | None:
    """What the truth counts under a name; None for a tensor that is no count."""
    return evidence.truth.get(name) if name.split("/")[1] in _COUNTS else None


def _sharded(outcomes: Outcomes) -> dict[str, bool]:
    """Names returned as shards -> whether every rank holds less than the full tensor."""
    smaller: dict[str, bool] = {}
    for outcome in outcomes:
        for name, parts in outcome.items():
            if parts and not all(part.whole for part in parts):
                less = _held(parts) < _numel(parts[0].global_shape)
                smaller[name] = smaller.get(name, True) and less
    return smaller


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _mesh(split: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in split.items())
