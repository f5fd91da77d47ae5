"""The regrouping law: one global batch gives one step, however it is split over ranks and micro-batches.

In another grouping data ranks and micro-batches take other samples, context ranks other tokens, stages other layers.

The law needs no dense model. Loss, token count, gradients and gradient norm of the first step are equal up to rounding.
So are the parameters after it, but for what an optimizer makes of rounding. A breach is named by its factor. Most real
bugs of data parallelism and gradient accumulation have one: a loss averaged instead of summed, a mean of means.

In lower precision the first step alone is compared. Each of the two groupings may be as far from exact arithmetic as
the control runs of the dense model allow, so they may differ by twice as much.
"""

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of, step_of
from shardproof.harness.checking.measures.many_tensors import kind_rms
from shardproof.harness.checking.measures.measured import Measured, epsilon
from shardproof.harness.checking.measures.stated_deviations import notes_on
from shardproof.harness.checking.measures.tolerance import FLOAT64_CEILING, measure
from shardproof.harness.checking.measuring import theoretical_error_of_sums
from shardproof.harness.checking.numeric_checks import as_worst
from shardproof.harness.checking.records import Claims, RecordedRun, Regrouped, Regroupings, Truth
from shardproof.harness.verdicts.facts import Fact, Note, NoteKind, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

_FIRST_STEP = ("loss", "tokens", "grad", "grad_norm")
_LATER = ("loss", "tokens", "grad_norm", "param", "param_after")
"""Kinds with the wider limit: an optimizer may make full steps of gradients that are zero but for rounding."""
_CONSTANT = 1e-6
"""A tensor is a multiple of another one if the rest is at most this share of it, or _EPSILONS if that is more."""
_EPSILONS = 64.0
"""The same in machine epsilons, for lower precisions."""


def check_regrouping(run: RecordedRun, truth: Truth, claims: Claims, regroupings: Regroupings) -> Finding:
    """Whether the step is the same in every other grouping that was run."""
    settled: dict[str, int] = {}  # sizes in which the step is the same
    by_model: list[Fact] = []
    for other in regroupings.runs:
        if flaw := next((flaw for flaw in other.flaws if flaw.name in run.tensors), None):
            here = _sizes_here(run, other)
            torn = state_fact(
                "torn_grouping", name=flaw.name, words=other.words, flaw=flaw.fact, kind=flaw.kind, here=here
            )
            return Finding(verdict=FAIL, facts=(torn,), names=(flaw.name,))
        wrong = tuple(measured for measured in _compare_groupings(run, truth, claims, other.tensors) if measured.wrong)
        if wrong:
            breach = _report_breach(run, other, wrong, settled)
            others = (
                wrong if _has_factor(breach) else tuple(one for one in wrong if not _is_the_models_own(run, other, one))
            )
            if others:
                return breach if others == wrong else _report_breach(run, other, others, settled)
            by_model.append(state_fact("model_by_grouping", change=breach.facts[0]))
            continue
        settled |= {} if other.problem else other.sizes
    by_design, stated = _by_design(run, claims), claims.known_differences
    applied = {name for name in by_design if stated and not stated.deviates_unapplied(name)}
    same = [other.words for other in regroupings.runs if not other.problem]
    late = [other for other in regroupings.runs if other.undecided]
    return Finding(
        verdict=UNKNOWN if late or by_model else PASS,
        facts=(*by_model, *(state_fact("run_not_ended", words=other.words, problem=other.problem) for other in late))
        or (state_fact("same_step", groupings=same),),
        notes=(
            *(
                Note(kind=NoteKind.UNFINISHED_GROUPING, names=(other.words,), reason=other.problem)
                for other in regroupings.runs
                if other.problem and not other.undecided
            ),
            *notes_on(NoteKind.DEVIATES, by_design, by_design.keys() - applied),
            *notes_on(NoteKind.DEVIATION_APPLIED, by_design, applied),
        ),
    )


def _by_design(run: RecordedRun, claims: Claims) -> dict[str, str]:
    """The names that the subject states to deviate, each with its sentence.

    Also those whose deviation the truth applies: what is counted or rounded on each rank depends on the grouping.
    """
    stated = claims.known_differences
    return {name: sentence for name in run.tensors if (sentence := stated.sentence(name))} if stated else {}


def _compare_groupings(
    run: RecordedRun, truth: Truth, claims: Claims, other: Mapping[str, Tensor]
) -> Iterator[Measured]:
    exact = run.dtype == "float64"
    base, by_design = run.tensors, _by_design(run, claims)
    sizes = kind_rms(base)
    for name, tensor in base.items():
        kind, step = kind_of(name), step_of(name)
        first = kind in _FIRST_STEP and (kind == "grad" or step == 0)
        if name not in other or other[name].shape != tensor.shape or name in by_design:
            continue
        lower = name in run.lower.names
        if first and (lower or not exact):
            yield _compare_rounded(run, truth, name, other[name], sizes.get(kind, 0.0))
        elif lower:
            continue
        elif first or (kind in _LATER and exact):
            found = measure(name, other[name], tensor, dtype="float64", kind=sizes.get(kind, 0.0))
            if first or found.error > FLOAT64_CEILING:
                yield found


def _compare_rounded(run: RecordedRun, truth: Truth, name: str, other: Tensor, kind: float) -> Measured:
    """Two tensors in lower precision, each within what control runs allow around the truth."""
    dtype, lower = run.dtype, run.lower.dtype if name in run.lower.names else ""
    if not other.is_floating_point():
        return measure(name, other, run.tensors[name], dtype=dtype)
    tensor, true = run.tensors[name].double(), truth.tensors.get(name)
    controls = []
    if true is not None and true.shape == tensor.shape:
        controls = [tensor + 2 * (control[name] - true) for control in truth.controls.runs if name in control]
    error = 2 * theoretical_error_of_sums(run, truth, name, narrow=True)
    return measure(name, other, tensor, dtype=dtype, lower=lower, controls=controls, kind=kind, summed=error)


def _has_factor(breach: Finding) -> bool:
    """Whether a tensor changes by a ratio of sizes."""
    values = breach.facts[0].values
    return bool(values["grows"] or values["falls"])


def _is_the_models_own(run: RecordedRun, other: Regrouped, wrong: Measured) -> bool:
    """Whether a tensor changes with the grouping exactly as the dense model's does.

    Then either the model depends on whole micro-batches, as batch norm does, or ranks and model average wrongly alike:
    this cannot be decided, unless the change is a ratio of sizes.
    """
    name = wrong.name
    true, size = other.truth.get(name), kind_rms(other.truth).get(kind_of(name), 0.0)
    if true is None:
        return False
    return (
        true.shape != other.tensors[name].shape
        or measure(name, other.tensors[name], true, dtype=run.dtype, kind=size).right
    )


def _report_breach(
    run: RecordedRun, other: Regrouped, wrong: tuple[Measured, ...], settled: Mapping[str, int]
) -> Finding:
    name = wrong[0].name
    known = [settled, {word: getattr(run.case, word) for word in other.sizes}]
    sizes = {word: size for word, size in other.sizes.items() if all(one.get(word) != size for one in known)}
    ratio, grows, falls = _find_factor(run.tensors[name].double(), other.tensors[name].double(), run, sizes)
    unlike = state_fact(
        "unlike_grouping",
        name=name,
        words=other.words,
        here=_sizes_here(run, other),
        ratio=ratio,
        grows=grows,
        falls=falls,
    )
    return Finding(
        verdict=FAIL,
        facts=(unlike,),
        worst=as_worst(wrong[0]),
        wrong=wrong,
        names=tuple(measured.name for measured in wrong),
    )


def _sizes_here(run: RecordedRun, other: Regrouped) -> str:
    """The words of a grouping, with the values of the case itself."""
    return " ".join(f"{word}={getattr(run.case, word)}" for word in other.sizes)


def _find_factor(
    base: Tensor, other: Tensor, run: RecordedRun, sizes: Mapping[str, int]
) -> tuple[float, list[str], list[str]]:
    """The factor of the other grouping's tensor on this one's, nan if it is no multiple; and the sizes with which it
    grows or falls.
    """
    square = float(base.square().sum())
    ratio = float((base * other).sum()) / square if square else math.nan
    left = float((other - ratio * base).square().sum()) if math.isfinite(ratio) else math.inf
    constant = max(_CONSTANT, _EPSILONS * epsilon(run.dtype))
    if not left <= constant**2 * square * ratio**2:
        return math.nan, [], []
    near = max(1e-4, constant)
    growth = {word: size / getattr(run.case, word) for word, size in sizes.items()}
    grows = [word for word, share in growth.items() if math.isclose(ratio, share, rel_tol=near)]
    falls = [word for word, share in growth.items() if math.isclose(ratio * share, 1.0, rel_tol=near)]
    return ratio, grows, falls


def check_truth(run: RecordedRun, truth: Truth) -> Finding | None:
    """Whether the first forward of the dense model in float32 equals that in float64 up to rounding
    (harness.running.trials.law_runs).

    A model that depends on the dtype by one operator passes: ranks are compared with it in the case's dtype.
    """
    measured = truth.first_forward
    if measured is None:
        return None
    if truth.of_dtype:
        notes = (Note(kind=NoteKind.DTYPE_DEPENDENT, reason=truth.of_dtype),)
        return Finding(verdict=PASS, facts=(state_fact("truth_by_dtype", dtype=run.case.dtype),), notes=notes)
    if measured.wrong:
        return Finding(verdict=FAIL, facts=(state_fact("truth_other", name=measured.name),), worst=as_worst(measured))
    return Finding(verdict=PASS, facts=(state_fact("truth_same", closest=measured.name),), worst=as_worst(measured))
