"""How far one merged tensor is from the truth, by all that is known of rounding in its case."""

import math
from dataclasses import replace

import torch

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import NUMERIC_KINDS, kind_of, step_of
from harness.checking.measures.measured import Measured, epsilon
from harness.checking.measures.sums import OVER_TOKENS, error_of_sums, tokens_of
from harness.checking.measures.tolerance import LEAP, measure

_MEANS, _SQUARES = "exp_avg_after", "exp_avg_sq_after"


def compared(evidence: Evidence, name: str, kind: float) -> Measured:
    """Compare a merged tensor with the truth, by all that is known of rounding; `kind` is the rms of its kind.

    Where a control run overflows in a step, nothing of that step decides: an overflow is a matter of rounding. In lower
    precision rounding alone may change half of the gradients' norm, or of their mean. Then a few control runs do not
    bound the optimizer's results: LEAP times as much is allowed, and its square of their squares. A sum over tokens in
    an accumulator as narrow as a 16-bit dtype is allowed only where the tensor is wrong for a wider one.
    """
    if evidence.lower is not None and name in evidence.beyond:
        return compared(evidence.lower, name, kind)
    wide, narrow = summed(evidence, name), summed(evidence, name, narrow=True)
    result = _measured(evidence, name, kind, wide)
    if not result.right and narrow > wide:
        result = _measured(evidence, name, kind, narrow)
    if result.right:
        return result
    if _overflowed(evidence, name):
        return replace(result, allowed=math.inf, decidable=False)
    leap = LEAP ** (2 if kind_of(name) == _SQUARES else 1)
    return replace(result, allowed=leap * result.allowed, decidable=False) if _leaps(evidence, name) else result


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
    known = [source for source in made_of if source in evidence.truth and source in evidence.merged.tensors]
    sources = (compared(evidence, source, 0.0) for source in known)
    return any(source.right and not source.decidable for source in sources)


def _overflowed(evidence: Evidence, name: str) -> bool:
    """Whether a loss or gradient norm of a control run is not finite, in the step of this tensor or before it."""
    whole = {"act": 0, "act_grad": 0, "grad": 0, "param": evidence.case.steps - 1, "saved": evidence.case.steps - 1}
    last = whole.get(kind_of(name), step_of(name))
    numbers = [(key, run[key]) for run in evidence.controls for key in run if kind_of(key) in ("loss", "grad_norm")]
    return any(step_of(key) <= last and not bool(torch.isfinite(number).all()) for key, number in numbers)
