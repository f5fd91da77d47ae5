"""Checks that hold merged tensors against the truth, one kind of name each. Errors are ratios (harness.tolerance)."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from harness.evidence import FAIL, PASS, UNKNOWN, Evidence, Finding, Worst
from harness.tolerance import Measured, kind_of, kind_rms, measure

__all__ = ["NUMERIC_KINDS", "coverage", "held", "numeric", "worst_of"]

NUMERIC_KINDS: dict[str, tuple[str, ...]] = {
    "forward": ("loss", "logits", "metric"),
    "activations": ("act",),
    "activation_gradients": ("act_grad",),
    "parameter_gradients": ("grad",),
    "gradient_norm": ("grad_norm",),
    "update": ("param",),
}
"""Check -> the kinds of names it compares, in the order in which training computes them."""


def numeric(check: str) -> Callable[[Evidence], Finding | None]:
    """The check that compares these kinds; it answers None when the subject returned nothing of them."""
    kinds = NUMERIC_KINDS[check]

    def compare(evidence: Evidence) -> Finding | None:
        return _compare(evidence, kinds)

    return compare


def _compare(evidence: Evidence, kinds: tuple[str, ...]) -> Finding | None:
    returned = {name for name in evidence.returned if kind_of(name) in kinds}
    if not returned:
        return None
    expected = [name for name in evidence.truth if kind_of(name) in kinds]
    known = [name for name in expected if name in evidence.merged.tensors]
    unchecked = [name for name in expected if name not in evidence.merged.tensors]
    unchecked += sorted(returned - set(expected) - set(unchecked))
    kinds_rms = kind_rms({name: evidence.truth[name] for name in expected})
    return _judged([held(evidence, name, kinds_rms.get(kind_of(name), 0.0)) for name in known], unchecked)


def held(evidence: Evidence, name: str, kind: float) -> Measured:
    """One merged tensor against the truth, by all that is known of rounding; `kind` is the rms of its kind."""
    return measure(
        name,
        evidence.merged.tensors[name],
        evidence.truth[name],
        dtype=evidence.case.dtype,
        controls=[control[name] for control in evidence.controls if name in control],
        kinks=[kink[name] for kink in evidence.kinks if name in kink],
        kind=kind,
    )


def _judged(measured: list[Measured], unchecked: list[str]) -> Finding:
    wrong = tuple(m for m in measured if not m.right)
    lost = [m.name for m in measured if m.right and not m.decidable]
    proved = [m for m in measured if m.right and m.decidable]
    unseen = tuple(unchecked + lost)
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
    if not proved:
        why = "rounding alone explains any error" if lost else "none of them could be merged or is known to the truth"
        return Finding(verdict=UNKNOWN, message=f"no tensor of this kind could be compared: {why}", unchecked=unseen)
    closest = worst_of(proved)
    message = f"{len(proved)} tensors agree; {closest.name} came closest to its limit"
    return Finding(verdict=PASS, message=message, worst=_worst(closest), unchecked=unseen)


def worst_of(measured: list[Measured] | tuple[Measured, ...]) -> Measured:
    """The tensor furthest beyond, or closest to, its limit; the first of equals."""
    return max(measured, key=lambda m: m.ratio)


def _worst(measured: Measured) -> Worst:
    return Worst(name=measured.name, error=measured.error, allowed=measured.allowed, epsilons=measured.epsilons)


def coverage(evidence: Evidence) -> Finding:
    """Whether there is anything to compare at all, and what of the truth the subject did not return."""
    returned = evidence.returned
    comparable = [name for name in evidence.truth if name in returned]
    unchecked = tuple(name for name in evidence.truth if name not in returned)
    strange = tuple(sorted(returned - set(evidence.truth)))
    if not comparable:
        got = f"it returned {', '.join(strange[:5])}" if strange else "it returned nothing"
        known = ", ".join(list(evidence.truth)[:3])
        message = f"nothing checkable: {got}; the truth has {len(evidence.truth)} names, such as {known}"
        return Finding(verdict=FAIL, message=message, unchecked=unchecked + strange, names=strange)
    message = f"{len(comparable)} of {len(evidence.truth)} tensors of the truth were returned"
    named = {name for outcome in evidence.outcomes for name in outcome}
    strange = tuple(name for name in strange if name in named)  # a module of its own is nobody's slip
    if not strange:
        return Finding(verdict=PASS, message=message, unchecked=unchecked)
    said = [name + "".join(f" ({near}?)" for near in get_close_matches(name, unchecked, n=1)) for name in strange[:5]]
    more = f" and {len(strange) - len(said)} more" if len(strange) > len(said) else ""
    message += (
        f"; the truth does not know {', '.join(said)}{more}: leave out what nobody can check, or name it as it does"
    )
    return Finding(verdict=UNKNOWN, message=message, unchecked=unchecked + strange)
