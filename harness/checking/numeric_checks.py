"""Checks that hold merged tensors against the truth, one kind of name each. Errors are ratios (see `tolerance`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from harness.checking.evidence import FAIL, PASS, UNKNOWN, Decided, Evidence, Finding, Worst
from harness.checking.measures.kinds import OVER_TOKENS, error_of_sums, kind_of, kind_rms, step_of, tokens_of
from harness.checking.measures.small_tensors import measured_together
from harness.checking.measures.stated_deviations import STATED
from harness.checking.measures.tolerance import LEAP, Measured, epsilon, measure

NUMERIC_KINDS: dict[str, tuple[str, ...]] = {
    "initial_values": ("init",),
    "masks": ("mask",),
    "tokens": ("tokens",),
    "routing": ("routing",),
    "forward": ("loss", "logits", "metric"),
    "activations": ("act",),
    "activation_gradients": ("act_grad",),
    "parameter_gradients": ("grad",),
    "gradient_norm": ("grad_norm",),
    "update": ("param_after", "exp_avg_after", "exp_avg_sq_after", "value_after", "param"),
    "saved": ("saved",),
}
"""Check -> the kinds of names it compares, in the order in which training computes them."""
KIND_WORDS: dict[str, str] = {
    "act": "activations",
    "act_grad": "activation gradients",
    "grad": "gradients",
    "grad_norm": "gradient norms",
    "param": "parameters",
    "param_after": "parameters",
    "exp_avg_after": "optimizer states",
    "exp_avg_sq_after": "optimizer states",
    "value_after": "values updated once a step",
}
"""Kind of name -> the kind of tensors in words, where that is another word than the name's."""
_REST = "forward"
"""The check that compares every other kind of name too: what a dense model of a subject's own returns beside these."""
_OVERFLOWS = "is not finite, and not in the dense model in this dtype either (legal: a smaller lr, or fewer steps)"
_ROUNDING = "rounding alone explains any error"
_UNMERGED = "none of them could be merged or is known to the truth"
_MEANS, _SQUARES = "exp_avg_after", "exp_avg_sq_after"
_EQUAL = 1e-6
"""By this share two errors may differ and be equal but for rounding."""
_KNOWN = frozenset(kind for kinds in NUMERIC_KINDS.values() for kind in kinds)
_NAMED = frozenset(KIND_WORDS.get(kind, kind) for kind in _KNOWN)


def numeric(check: str) -> Callable[[Evidence], Finding | None]:
    """The check that compares these kinds; it answers None when the subject returned nothing of them."""
    kinds = NUMERIC_KINDS[check]

    def belongs(name: str) -> bool:
        kind = kind_of(name)
        return kind in kinds or (check == _REST and kind not in _KNOWN)

    def compare(evidence: Evidence) -> Finding | None:
        return _compare(evidence, belongs)

    return compare


def _compare(evidence: Evidence, belongs: Callable[[str], bool]) -> Finding | None:
    returned = {name for name in evidence.returned if belongs(name)}
    if not returned:
        return None
    expected = [name for name in evidence.truth if belongs(name)]
    if not expected and not any(returned & outcome.keys() for outcome in evidence.outcomes):
        return None  # captured, where the truth has none: gradients of a step that a loss scale skips
    known = [name for name in expected if name in evidence.merged.tensors]
    unchecked = [name for name in expected if name not in evidence.merged.tensors]
    unchecked += sorted(returned - set(expected) - set(unchecked))
    kinds_rms = kind_rms({name: evidence.truth[name] for name in expected})
    quick = _together(evidence, known, kinds_rms)
    measured = [quick.get(name) or held(evidence, name, kinds_rms.get(kind_of(name), 0.0)) for name in known]
    found = evidence.deviates.apart(measured)
    unseen = unchecked + found.unchecked
    counts = _counted(found.judged, unseen, {kind_of(name) for name in returned})
    finding = _with_each_kind(_judged(found.judged, unseen), counts, found.judged)
    return replace(finding, message="; ".join([finding.message, *found.told]), decided=counts)


def _counted(measured: Sequence[Measured], unchecked: Sequence[str], kinds: Collection[str]) -> dict[str, Decided]:
    """How many tensors are decided, and of how many, by kind of name; kinds that nobody returned are left out."""
    of = Counter(kind_of(name) for name in (*(m.name for m in measured), *unchecked))
    decided = Counter(kind_of(m.name) for m in measured if _decided(m))
    return {kind: (decided[kind], count) for kind, count in of.items() if kind in kinds}


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


def _together(evidence: Evidence, names: list[str], kinds: Mapping[str, float]) -> dict[str, Measured]:
    """The tensors that are held to float64's own limits alone, compared at once: no control run, kink or slack is known
    of them.
    """
    if evidence.dtype != "float64":
        return {}
    known = {*evidence.slack, *evidence.beyond}.union(*evidence.controls, *evidence.kinks)
    values = {name: evidence.merged.tensors[name] for name in names if name not in known}
    return measured_together(values, evidence.truth, kinds)


def held(evidence: Evidence, name: str, kind: float) -> Measured:
    """One merged tensor compared with the truth, by all that is known of rounding; `kind` is the rms of its kind.

    Where a control run overflows in a step, nothing of that step decides: what overflows is a matter of rounding. Where
    rounding alone changes half of the gradients' norm, or of their mean, in lower precision, a few control runs do not
    bound what the optimizer makes of them: LEAP times as much is allowed, and its square of their squares. A sum over
    tokens in an accumulator as narrow as a 16-bit dtype is allowed only where the tensor is wrong for a wider one.
    """
    if evidence.lower is not None and name in evidence.beyond:
        return held(evidence.lower, name, kind)
    wide, narrow = summed(evidence, name), summed(evidence, name, narrow=True)
    found = _measured(evidence, name, kind, wide)
    if not found.right and narrow > wide:
        found = _measured(evidence, name, kind, narrow)
    if found.right:
        return found
    if _overflowed(evidence, name):
        return replace(found, allowed=math.inf, decidable=False)
    leap = LEAP ** (2 if kind_of(name) == _SQUARES else 1)
    return replace(found, allowed=leap * found.allowed, decidable=False) if _leaps(evidence, name) else found


def _measured(evidence: Evidence, name: str, kind: float, summed_error: float) -> Measured:
    return measure(
        name,
        evidence.merged.tensors[name],
        evidence.truth[name],
        dtype=evidence.dtype_of(name),
        controls=[control[name] for control in evidence.controls if name in control],
        far=evidence.far.get(name),
        kinks=[kink[name] for kink in evidence.kinks if name in kink],
        slack=evidence.slack.get(name),
        kind=kind,
        summed=summed_error,
    )


def summed(evidence: Evidence, name: str, *, narrow: bool = False) -> float:
    """The relative error that a tensor has in theory because its tokens are added up (see error_of_sums)."""
    if kind_of(name) not in OVER_TOKENS:
        return 0.0
    unit = epsilon(evidence.dtype_of(name))
    return error_of_sums(kind_of(name), tokens_of(evidence.truth, evidence.case.micro), unit, narrow=narrow)


def _leaps(evidence: Evidence, name: str) -> bool:
    """Whether the optimizer made a tensor, in lower precision, of gradients that rounding alone changes by half."""
    kind, _, place = name.partition("/")
    if kind not in NUMERIC_KINDS["update"] or evidence.dtype == "float64":
        return False
    step = evidence.case.steps - 1 if kind == "param" else step_of(name)
    made_of = (f"grad_norm/{step}", *((f"{_MEANS}/{place}",) if kind == _SQUARES else ()))
    known = (held(evidence, one, 0.0) for one in made_of if one in evidence.truth and one in evidence.merged.tensors)
    return any(one.right and not one.decidable for one in known)


def _overflowed(evidence: Evidence, name: str) -> bool:
    """Whether a loss or gradient norm of a control run is not finite, in the step of this tensor or before it."""
    whole = {"act": 0, "act_grad": 0, "grad": 0, "param": evidence.case.steps - 1, "saved": evidence.case.steps - 1}
    last = whole.get(kind_of(name), step_of(name))
    numbers = [(key, run[key]) for run in evidence.controls for key in run if kind_of(key) in ("loss", "grad_norm")]
    return any(step_of(key) <= last and not bool(torch.isfinite(number).all()) for key, number in numbers)


def _judged(measured: Sequence[Measured], unchecked: list[str]) -> Finding:
    wrong = tuple(m for m in measured if m.wrong)
    overflowing = [m.name for m in measured if m.overflows]
    lost = [m.name for m in measured if m.right and not _decided(m)] + overflowing
    proved = [m for m in measured if m.right and _decided(m)]
    unseen = tuple(unchecked + lost + [_loose(m) for m in proved if m.loose])
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
    largest = max(one.ratio for one in measured)
    return next(one for one in measured if one.ratio >= largest * (1 - _EQUAL))


def _worst(measured: Measured) -> Worst:
    return Worst(name=measured.name, error=measured.error, allowed=measured.allowed, epsilons=measured.epsilons)
