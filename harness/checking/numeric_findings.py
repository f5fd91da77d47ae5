"""What comparisons of tensors with the truth come to: right, wrong, or undecided where rounding explains any error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from harness.checking.evidence import FAIL, PASS, UNKNOWN, Decided, Finding, Worst
from harness.checking.measures.kinds import KIND_WORDS, NUMERIC_KINDS, kind_of
from harness.checking.measures.measured import STATED, Measured

_OVERFLOWS = "is not finite, and not in the dense model in this dtype either (legal: a smaller lr, or fewer steps)"
_ROUNDING = "rounding alone explains any error"
_UNMERGED = "none of them could be merged or is known to the truth"
_EQUAL = 1e-6
"""By this share two errors may differ and be equal but for rounding."""
_NAMED = frozenset(KIND_WORDS.get(kind, kind) for kinds in NUMERIC_KINDS.values() for kind in kinds)


def numeric_finding(measured: Sequence[Measured], unchecked: Sequence[str], kinds: Collection[str]) -> Finding:
    """What these comparisons come to: wrong, right, or unknown where a kind that was returned has no decided tensor."""
    decided = Counter(kind_of(m.name) for m in measured if _decided(m))
    of = Counter(kind_of(name) for name in (*(m.name for m in measured), *unchecked))
    counts = {kind: (decided[kind], count) for kind, count in of.items() if kind in kinds}
    return replace(_with_each_kind(_judged(measured, unchecked), counts, measured), decided=counts)


def _decided(measured: Measured) -> bool:
    """Whether right is told from wrong: beyond its limits, or within limits that admit no half of it."""
    return measured.wrong or (measured.right and (measured.decidable or measured.zero))


def _with_each_kind(finding: Finding, counts: Mapping[str, Decided], measured: Sequence[Measured]) -> Finding:
    """The finding, unknown instead of passed where a kind that was returned has no tensor that is decided."""
    totals: Counter[str] = Counter()
    for kind, (decided, _) in counts.items():
        totals[called(kind)] += decided
    empty = [kind for kind, decided in totals.items() if not decided and kind in _NAMED]
    if finding.verdict != PASS or not empty:
        return finding
    names = [name for name in finding.unchecked if called(kind_of(name)) == empty[0]]
    lost = any(m.right and called(kind_of(m.name)) == empty[0] for m in measured)
    message = f"no tensor of the {empty[0]} could be compared: {_why(names, lost=lost)}; first: {names[0]}"
    return replace(finding, verdict=UNKNOWN, message=message)


def _why(unchecked: Sequence[str], *, lost: bool) -> str:
    """Why no tensor of a kind is decided; `lost`: rounding explains what one of them holds."""
    deviating = "every one deviates as stated" if any(STATED in name for name in unchecked) else _UNMERGED
    return _ROUNDING if lost else deviating


def _judged(measured: Sequence[Measured], unchecked: Sequence[str]) -> Finding:
    wrong = tuple(m for m in measured if m.wrong)
    overflowing = [m.name for m in measured if m.overflows]
    lost = [m.name for m in measured if m.right and not _decided(m)] + overflowing
    proved = [m for m in measured if m.right and _decided(m)]
    unseen = tuple([*unchecked, *lost, *(_loose(m) for m in proved if m.loose)])
    if wrong:
        first = worst_of(wrong)
        return Finding(
            verdict=FAIL,
            message=f"{first.name} differs from the dense model",
            worst=_worst(first),
            unchecked=unseen,
            wrong=wrong,
            names=tuple(m.name for m in wrong),
        )
    if overflowing:
        return Finding(verdict=UNKNOWN, message=f"{overflowing[0]} {_OVERFLOWS}", unchecked=unseen)
    if not proved:
        why = _why(unchecked, lost=bool(lost))
        return Finding(verdict=UNKNOWN, message=f"no tensor of this kind could be compared: {why}", unchecked=unseen)
    closest = worst_of(proved)
    message = f"{len(proved)} tensors agree; {closest.name} came closest to its limit"
    return Finding(verdict=PASS, message=message, worst=_worst(closest), unchecked=unseen)


def called(kind: str) -> str:
    """A kind of name in words: "gradients" of "grad", "loss" of "loss"."""
    return KIND_WORDS.get(kind, kind)


def _loose(measured: Measured) -> str:
    return f"{measured.name} ({measured.loose} of {measured.elements} elements, where Adam's step follows rounding)"


def worst_of(measured: Sequence[Measured]) -> Measured:
    """The tensor furthest beyond, or closest to, its limit; the first of those that are equal but for rounding."""
    largest = max(each.ratio for each in measured)
    return next(each for each in measured if each.ratio >= largest * (1 - _EQUAL))


def _worst(measured: Measured) -> Worst:
    return Worst(name=measured.name, error=measured.error, allowed=measured.allowed, epsilons=measured.epsilons)
