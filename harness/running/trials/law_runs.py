"""Runs for the laws of subjects: the same global batch over other ranks and micro-batches, the dense model in float32.

The runs in other groupings must give the same step. The run in float32 shows whether the dense model is one function in
every dtype, up to rounding.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from shardproof.harness.checking.measures.distance import as_float64, distance
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS, kind_of, step_of
from shardproof.harness.checking.measures.measured import FLOAT64_ALLOWED, Measured, epsilon
from shardproof.harness.checking.measures.tolerance import CONTROL_FACTOR, FLOOR_EPSILONS, LEAP
from shardproof.harness.checking.measuring import INITIAL, ROUNDING
from shardproof.harness.checking.records import Regrouped, Regroupings, Truth
from shardproof.harness.errors import MachineError, ProgramError, RequestError
from shardproof.harness.mesh_axes import SAME_SAMPLES
from shardproof.harness.outcome.merging import merge_outcomes
from shardproof.harness.protocols import CaseLike, without_saving
from shardproof.harness.running.trials.trial import Trial
from shardproof.harness.running.truth.control_modes import PERTURBED
from shardproof.harness.running.truth.of_dtype import (
    Forward,
    ForwardWatched,
    OperatorStep,
    differing_operator,
    steps_of,
)
from shardproof.harness.running.truth.own import OwnTruth
from shardproof.harness.subject import NamedSubject, OnRanks, offers, own_cases, refusal

_GROUPINGS = 2
_LARGEST = 8
"""The most ranks of a grouping, unless the case itself has more."""


def run_regroupings(trial: Trial, truth: Truth) -> Regroupings | None:
    """Up to _GROUPINGS runs of the same global batch in other groupings (`groupings`); None if there are none.

    A run that does not end is no failure.
    """
    if truth.from_ranks or truth.unmergeable:  # in another grouping the ranks draw other numbers
        return None
    found = tuple(_run_grouping(trial, truth, sizes, case) for sizes, case in groupings(trial.case, trial.subject))
    return Regroupings(runs=found) if found else None


def _run_grouping(trial: Trial, truth: Truth, sizes: dict[str, int], case: CaseLike) -> Regrouped:
    try:
        with trial.time_part("regrouped"):
            run = trial.run(trial.subject.call, case, name=trial.subject.address)
    except ProgramError as error:
        return Regrouped(sizes=sizes, problem=error.cause)
    except MachineError as error:  # no failure of the case, whose own run has ended
        return Regrouped(sizes=sizes, problem=error.cause, undecided=True)
    merged = merge_outcomes(run.outcomes)
    true = _truth_of_grouping(trial, truth, case, merged.tensors)
    return Regrouped(sizes=sizes, tensors=merged.tensors, truth=true, flaws=merged.flaws)


def _truth_of_grouping(
    trial: Trial, truth: Truth, case: CaseLike, grouped: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The dense model in this grouping, if the first loss or a gradient differs there from the truth; else empty.

    Also empty for our decoder, and for a truth that is a subject on ranks.
    """
    own = trial.reference.own
    first = [name for name in truth.tensors if kind_of(name) in ("loss", "grad") and step_of(name) <= 0]
    apart = (distance(grouped[n], truth.tensors[n]).frobenius for n in first if _fits(grouped, n, truth.tensors))
    if own is None or isinstance(own.dense, OnRanks) or max(apart, default=0.0) <= FLOAT64_ALLOWED:
        return {}
    with suppress(RequestError):  # a dense model that does not take these words
        return trial.compute_anew(own, case)
    return {}


def most_exact(case: CaseLike, subject: NamedSubject) -> bool:
    """Whether the case is in float64, or the subject refuses it in float64."""
    if case.dtype == "float64":
        return True
    with suppress(ValueError):  # the vocabulary may lack float64
        return bool(refusal(case.but(dtype="float64"), subject))
    return True


def groupings(case: CaseLike, subject: NamedSubject) -> list[tuple[dict[str, int], CaseLike]]:
    """Up to _GROUPINGS other values of dp and micro with the same product, each pair with its case.

    The first pair has the fewest data ranks, the next ones as many as fit on the ranks of the case, or on _LARGEST. If
    the subject takes that, the last pair also changes the numbers of context ranks and stages. Refused sizes are left
    out.

    Empty unless the case is `most_exact`, if the subject's mathematics depends on which rank holds what, or without a
    data axis. A subject with cases of its own has one if any of these has several data ranks.
    """
    dp, named = getattr(case, "dp", 0), own_cases(subject)
    has_data_axis = dp > 1 or (dp == 1 and (named is None or any(getattr(one, "dp", 0) > 1 for one in named)))
    if not has_data_axis or not most_exact(case, subject) or getattr(case, "truth_depends_on_split", False):
        return []
    whole, most = dp * case.micro, max(case.world_size, _LARGEST) * dp // case.world_size
    sizes = [n for n in range(1, min(whole, most) + 1) if whole % n == 0 and n != dp]
    found = _find_legal(case, subject, [{"dp": n, "micro": whole // n} for n in sizes[:1] + sizes[:0:-1]], _GROUPINGS)
    spread = _find_legal(
        case, subject, [{"dp": 1, "micro": whole, **words} for words in _other_slices_and_stages(case, subject)], 1
    )
    return [*found[: _GROUPINGS - len(spread)], *spread]


def _other_slices_and_stages(case: CaseLike, subject: NamedSubject) -> list[dict[str, int]]:
    """Words that change the numbers of context ranks and stages: both, then one of them.

    Empty for a subject without `refuses`, which has not stated that it knows these words. A subject with cases of its
    own knows a word if one of these has several such ranks.
    """
    own = own_cases(subject)
    named = (case,) if own is None and offers(subject.call, "refuses") else own or ()
    words = [word for word in SAME_SAMPLES if any(hasattr(one, word) for one in named)]
    if own is not None:
        words = [word for word in words if any(getattr(one, word) > 1 for one in own)]
    changed = {word: 1 if getattr(case, word) > 1 else 2 for word in words}
    return [changed, *({word: size} for word, size in changed.items())] if changed else []


def _find_legal(
    case: CaseLike, subject: NamedSubject, sizes: list[dict[str, int]], most: int
) -> list[tuple[dict[str, int], CaseLike]]:
    """The first `most` of these sizes that break no rule and are not refused, with their cases.

    The cases need no more ranks than `case`, or _LARGEST.
    """
    legal: list[tuple[dict[str, int], CaseLike]] = []
    for words in sizes:
        with suppress(ValueError):  # this grouping breaks a rule of the case language
            other = case.but(**words, **without_saving(case))
            fits = len(legal) < most and other.world_size <= max(case.world_size, _LARGEST)
            if fits and not refusal(other, subject):
                legal.append((words, other))
    return legal


DTYPE = "float32"
"""The dtype that is compared with float64: rounding to 16 bits would hide that the function is another one."""
_LATER = {kind for check, kinds in NUMERIC_KINDS.items() if check not in ("forward", "activations") for kind in kinds}
"""Kinds of tensors that are not computed in a forward."""
_UNSEEN = epsilon(DTYPE) ** 0.5
"""The limit of a truth that uses no operators of torch, as in numpy: rounding takes less than half of the digits."""
_MANY = 16
"""In a tensor of fewer elements, some that differ are most of them."""


def with_first_forward(trial: Trial, truth: Truth) -> Truth:
    """The truth with the tensor of the dense model's first forward whose error in float32 is furthest beyond its limit.

    A dense model may draw its weights in the case's dtype. Then the same seed gives others in float32 than in float64,
    and limits made from the distance of the two runs would let anything pass. The error of the first forward shows it.

    If one operator causes the error (harness.running.truth.of_dtype), the function that the model computes depends on
    the dtype, and the truth becomes that of the case's dtype.

    Unchanged for our decoder, for a case in float64, and for a dense model without float32 or a forward to compare.
    """
    own = trial.reference.own
    if not own or trial.case.dtype == "float64":
        return truth
    found = _measure_first_forward(trial, truth)
    if found is None:
        return truth
    truth = replace(truth, first_forward=found)
    if found.right:
        return truth
    operator = differing_operator(_forward(trial, own, "float64"), _forward(trial, own, DTYPE), found.error)
    return _truth_of_dtype(trial, truth, operator) if operator else truth


def _measure_first_forward(trial: Trial, truth: Truth) -> Measured | None:
    """The tensor of the first forward that is furthest off in float32, with its limit.

    None if there is no such forward, or if only some rows differ, since there a router chose otherwise.
    """
    names = [n for n, tensor in truth.tensors.items() if _of_first_forward(n) and tensor.is_floating_point()]
    if not names:
        return None
    controls = truth.controls.runs
    run = controls[0] if trial.case.dtype == DTYPE and controls else _run_in_float32(trial, parts=2)
    true = {name: truth.tensors[name] for name in names if _fits(run, name, truth.tensors)}
    gaps = {name: distance(run[name], true[name]).frobenius for name in true if true[name].any()}
    limits = _limits_in_float32(trial, truth, run, gaps)
    off = [name for name in gaps if gaps[name] > limits[name]]
    if not gaps or any(not _differs_mostly(run[name], true[name], limits[name]) for name in off):
        return None
    worst = max(gaps, key=lambda name: gaps[name] / limits[name])
    epsilons = gaps[worst] / epsilon(trial.case.dtype)
    return Measured(name=worst, measure="frobenius", error=gaps[worst], allowed=limits[worst], epsilons=epsilons)


def _limits_in_float32(
    trial: Trial, truth: Truth, run: Mapping[str, Tensor], gaps: Mapping[str, float]
) -> dict[str, float]:
    """By name, the largest error of a first forward that rounding to float32 explains.

    In theory that is the error of many sums (`_theory`). A model may amplify rounding, so LEAP times the effect that
    random errors in the results of all operators have is explained too; the largest effect of several draws counts.
    """
    theory = CONTROL_FACTOR * _theory(truth.tensors)
    limits = dict.fromkeys(gaps, max(FLOOR_EPSILONS["peak"] * epsilon(DTYPE), theory))
    largest = 0.0
    for parts in PERTURBED:
        if all(gaps[name] <= limits[name] for name in gaps):
            return limits
        other = _run_in_float32(trial, parts=parts)
        for name in gaps:
            effect = distance(other[name], run[name]).frobenius if _fits(other, name, truth.tensors) else math.inf
            limits[name], largest = max(limits[name], LEAP * effect), max(largest, effect)
    # If no draw had an effect, the operators were not seen, since they are, for example, numpy's.
    return limits if largest else {name: max(limit, _UNSEEN) for name, limit in limits.items()}


def _truth_of_dtype(trial: Trial, truth: Truth, operator: str) -> Truth:
    """The truth with the tensors of a control run in the case's dtype, as far as they are finite."""
    run = trial.compute_anew(trial.reference.control, part="control", parts=1)
    known = [n for n in truth.tensors if _fits(run, n, truth.tensors) and bool(run[n].isfinite().all())]
    tensors = {**truth.tensors, **{name: run[name].to(truth.tensors[name].dtype) for name in known}}
    initial = {name.removeprefix(INITIAL): run[name].double() for name in run if name.startswith(INITIAL)}
    return replace(truth, tensors=tensors, initial=initial, of_dtype=operator)


def _forward(trial: Trial, own: OwnTruth, dtype: str) -> Sequence[OperatorStep]:
    """The operators of the dense model's first forward in this dtype."""
    case = trial.case.but(dtype=dtype, **without_saving(trial.case))
    if isinstance(own.dense, OnRanks):
        subject = replace(own.dense.subject, call=own.with_masks(trial.given or None), address="")
        with trial.time_part("control"):
            return steps_of(trial.run(ForwardWatched(subject), own.dense.case_of(case)).outcomes[0])
    forward = Forward()
    trial.compute_anew(replace(own, control=True, around=lambda: forward), case, part="control", parts=1)
    return forward.steps


def _of_first_forward(name: str) -> bool:
    kind = kind_of(name)
    return kind not in _LATER and (kind == "act" or step_of(name) == 0)


def _run_in_float32(trial: Trial, *, parts: int) -> Mapping[str, Tensor]:
    """A run of the dense model in float32; empty if it refuses that."""
    try:
        return trial.compute_anew(trial.reference.control, trial.case.but(dtype=DTYPE), part="control", parts=parts)
    except (RequestError, ValueError):
        return {}


def _fits(run: Mapping[str, Tensor], name: str, truth: Mapping[str, Tensor]) -> bool:
    return name in run and name in truth and run[name].shape == truth[name].shape


def _theory(truth: Mapping[str, Tensor]) -> float:
    """The relative error of as many sums in a row as there are parameters, each as long as the longest dim."""
    shapes = [tensor.shape for name, tensor in truth.items() if kind_of(name) in ("grad", "param")]
    names = {name.partition("/")[2] for name in truth if kind_of(name) in ("grad", "param")}
    longest = max((size for shape in shapes for size in shape), default=1)
    return ROUNDING * epsilon(DTYPE) * math.sqrt(max(len(names), 1) * (longest + 1) / 2)


def _differs_mostly(value: Tensor, truth: Tensor, allowed: float) -> bool:
    """Whether most elements are off by more than this, and not only those of some rows."""
    gap, size = (as_float64(value) - as_float64(truth)).abs(), float(as_float64(truth).square().mean().sqrt())
    return truth.numel() < _MANY or float((gap > allowed * size).double().mean()) > 0.5
