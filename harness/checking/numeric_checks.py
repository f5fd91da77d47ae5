"""Checks that compare merged tensors with the truth, one kind of name each. Errors are ratios (see `tolerance`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from harness.checking.evidence import FAIL, Evidence, Finding
from harness.checking.measures.kinds import NUMERIC_KINDS, kind_of
from harness.checking.measures.many_tensors import kind_rms, measured_together
from harness.checking.measures.measured import Measured
from harness.checking.numeric_findings import numeric_finding

_REST = "forward"
"""The check that compares every other kind of name too: what a dense model of a subject's own returns beside these."""
_KNOWN = frozenset(kind for kinds in NUMERIC_KINDS.values() for kind in kinds)


def numeric(
    check: str, its_own: Callable[[Evidence], Finding | None] | None = None
) -> Callable[[Evidence], Finding | None]:
    """The check that compares these kinds, or does as is handed in; None when the subject returned none of them."""
    kinds = NUMERIC_KINDS[check]

    def belongs(name: str) -> bool:
        kind = kind_of(name)
        return kind in kinds or (check == _REST and kind not in _KNOWN)

    def compare(evidence: Evidence) -> Finding | None:
        returned = {name for name in evidence.returned if belongs(name)}
        if not returned:
            return None
        return its_own(evidence) if its_own else _compare(evidence, returned, belongs)

    return compare


def _compare(evidence: Evidence, returned: Set[str], belongs: Callable[[str], bool]) -> Finding | None:
    expected = [name for name in evidence.truth if belongs(name)]
    if not expected and not any(returned & outcome.keys() for outcome in evidence.outcomes):
        return None  # captured, where the truth has none: gradients of a step that a loss scale skips
    known = [name for name in expected if name in evidence.merged.tensors]
    unchecked = [name for name in expected if name not in evidence.merged.tensors]
    unchecked += sorted(returned - set(expected) - set(unchecked))
    results, notes = _measured(evidence, known, expected), list[str]()
    if evidence.deviates:
        results, by_design, notes = evidence.deviates.apart(results)
        unchecked += by_design
    finding = numeric_finding(results, unchecked, {kind_of(name) for name in returned})
    return replace(finding, message="; ".join([finding.message, *notes]))


def _measured(evidence: Evidence, names: Sequence[str], kinds: Sequence[str]) -> list[Measured]:
    """These merged tensors compared with the truth; the names of `kinds` give the rms of each kind.

    Tensors of which no control run, kink or slack is known, so that float64's own limits hold, are compared at once.
    """
    sizes = kind_rms({name: evidence.truth[name] for name in kinds})
    together: Mapping[str, Measured] = {}
    if evidence.dtype == "float64":
        known = {*evidence.slack, *evidence.beyond}.union(*evidence.controls, *evidence.kinks)
        values = {name: evidence.merged.tensors[name] for name in names if name not in known}
        together = measured_together(values, evidence.truth, sizes)
    if all(name in together for name in names):
        return [together[name] for name in names]
    from harness.checking.measuring import compared  # noqa: PLC0415

    return [together.get(name) or compared(evidence, name, sizes.get(kind_of(name), 0.0)) for name in names]


_counts = numeric("tokens")


def tokens(evidence: Evidence) -> Finding | None:
    """Whether every step counts as many tokens as the dense model, exactly: the number that its mean divides by."""
    finding = _counts(evidence)
    if finding is None or finding.verdict != FAIL or finding.worst is None:
        return finding
    name = finding.worst.name
    counted, must = (int(tensors[name]) for tensors in (evidence.merged.tensors, evidence.truth))
    return replace(finding, message=f"{name} is {counted}, and the dense model counts {must}")
