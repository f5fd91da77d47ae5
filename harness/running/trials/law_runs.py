"""Runs for the laws of a subject with a truth of its own: of the same global batch, over other ranks and micro-batches.

Then whether its dense model computes one function in every precision, but for rounding, or depends on the dtype.
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
"""Ranks of a grouping, where the case itself has fewer."""


def run_regroupings(trial: Trial, truth: Truth) -> Regroupings | None:
    """Up to _GROUPINGS runs of the same global batch, grouped otherwise (`groupings`); None where there is none.

    Only in float64, or in another dtype of a subject that refuses it. An unfinished run is no failure.
    """
    if truth.from_ranks or truth.unmergeable:  # another grouping draws other numbers
        return None
    found = tuple(_run_grouping(trial, truth, sizes, case) for sizes, case in groupings(trial.case, trial.subject))
    return Regroupings(runs=found) if found else None


def _run_grouping(trial: Trial, truth: Truth, sizes: dict[str, int], case: CaseLike) -> Regrouped:
    try:
        with trial.time_part("regrouped"):
            run = trial.run(trial.subject.call, case, name=trial.subject.address)
    except ProgramError as error:
        return Regrouped(sizes=sizes, problem=error.cause)
    except MachineError as error:  # says nothing about the case, whose own run has ended
        return Regrouped(sizes=sizes, problem=error.cause, undecided=True)
    merged = merge_outcomes(run.outcomes)
    true = _truth_of_grouping(trial, truth, case, merged.tensors)
    return Regrouped(sizes=sizes, tensors=merged.tensors, truth=true, flaws=merged.flaws)


def _truth_of_grouping(
    trial: Trial, truth: Truth, case: CaseLike, grouped: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The dense model in this grouping, where the first loss or a gradient is another one there than the truth's.

    Nothing where the dense model is no function of the subject's own: then it takes its samples in groups of its own.
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
    with suppress(ValueError):  # a vocabulary without float64
        return bool(refusal(case.but(dtype="float64"), subject))
    return True


def groupings(case: CaseLike, subject: NamedSubject) -> list[tuple[dict[str, int], CaseLike]]:
    """Up to _GROUPINGS other sizes, each with its case: of dp and micro with the same product.

    First one data rank, then as many as fit on the ranks there are, or _LARGEST. The last, where it can be, also has
    other context ranks and stages. None are there without a data axis, which a subject of own cases has where one of
    them has data ranks. None are there where the case's mathematics depends on which rank holds what; sizes that the
    subject refuses are left out.
    """
    dp, named = getattr(case, "dp", 0), own_cases(subject)
    has_data_axis = dp > 1 or (dp == 1 and (named is None or any(getattr(one, "dp", 0) > 1 for one in named)))
    if not has_data_axis or not most_exact(case, subject) or getattr(case, "truth_depends_on_split", False):
        return []
    whole, most = dp * case.micro, max(case.world_size, _LARGEST) * dp // case.world_size
    sizes = [n for n in range(1, min(whole, most) + 1) if whole % n == 0 and n != dp]
    found = _legal(case, subject, [{"dp": n, "micro": whole // n} for n in sizes[:1] + sizes[:0:-1]], _GROUPINGS)
    spread = _legal(case, subject, [{"dp": 1, "micro": whole, **words} for words in _otherwise(case, subject)], 1)
    return [*found[: _GROUPINGS - len(spread)], *spread]


def _otherwise(case: CaseLike, subject: NamedSubject) -> list[dict[str, int]]:
    """Other numbers of context ranks and stages: both, then one of them.

    A subject without `refuses` has not stated that it knows these words. A subject of own cases has them where a case
    names several such ranks.
    """
    own = own_cases(subject)
    named = (case,) if own is None and offers(subject.call, "refuses") else own or ()
    words = [word for word in SAME_SAMPLES if any(hasattr(one, word) for one in named)]
    if own is not None:
        words = [word for word in words if any(getattr(one, word) > 1 for one in own)]
    changed = {word: 1 if getattr(case, word) > 1 else 2 for word in words}
    return [changed, *({word: size} for word, size in changed.items())] if changed else []


def _legal(
    case: CaseLike, subject: NamedSubject, sizes: list[dict[str, int]], most: int
) -> list[tuple[dict[str, int], CaseLike]]:
    """The first of these sizes, with their cases, that break no rule and are not refused.

    They need no more than _LARGEST ranks or those of the case.
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
"""Dtype that is compared with float64: the roundings of a 16-bit case would hide another function."""
_LATER = {kind for check, kinds in NUMERIC_KINDS.items() if check not in ("forward", "activations") for kind in kinds}
"""Kinds of names that are no numbers of a forward."""
_UNSEEN = epsilon(DTYPE) ** 0.5
"""What is allowed where no operator of a truth is seen, as of numpy: rounding takes less than half of the digits."""
_MANY = 16
"""Elements of a tensor of which some may differ and not most."""


def with_first_forward(trial: Trial, truth: Truth) -> Truth:
    """The truth with the tensor of the dense model's first forward that is furthest off in float32.

    As it is for the decoder, and where the dense model has no float32 run, or no forward to compare. A dense model that
    draws its weights in the case's dtype is another model in float32 than in float64. Other numbers come of the same
    seed. The distance of its control runs is no rounding then, and limits made of it let anything pass.

    So the first forward of its float32 run is held against that in float64. Rounding explains the error in theory of as
    many operations in a row as there are tensors of parameters. Each is a sum of as many terms as the longest dim of
    them has elements. A model may amplify rounding. So LEAP times the effect of a random error in the result of
    every operator is explained too, of several draws the largest. Where a router chooses otherwise, some rows differ,
    which decides nothing.

    Where the difference came from one operator (harness.running.truth.of_dtype), the function depends on the dtype, and
    the truth is that in the case's dtype.
    """
    names = [n for n, tensor in truth.tensors.items() if _of_first_forward(n) and tensor.is_floating_point()]
    own, dtype = trial.reference.own, trial.case.dtype
    if not names or not own or dtype == "float64":
        return truth
    run = truth.controls.runs[0] if dtype == DTYPE and truth.controls.runs else _lower(trial, parts=2)
    true = {name: truth.tensors[name] for name in names if _fits(run, name, truth.tensors)}
    gaps = {name: distance(run[name], true[name]).frobenius for name in true if true[name].any()}
    theory = CONTROL_FACTOR * _theory(truth.tensors)
    allowed = dict.fromkeys(gaps, max(FLOOR_EPSILONS["peak"] * epsilon(DTYPE), theory))
    moved = 0.0
    for parts in PERTURBED:
        if all(gaps[name] <= allowed[name] for name in gaps):
            break
        other = _lower(trial, parts=parts)
        for name in gaps:
            between = distance(other[name], run[name]).frobenius if _fits(other, name, true) else math.inf
            allowed[name], moved = max(allowed[name], LEAP * between), max(moved, between)
    else:
        allowed = {name: max(limit, 0.0 if moved else _UNSEEN) for name, limit in allowed.items()}
    off = [name for name in gaps if gaps[name] > allowed[name]]
    if not gaps or any(not _mostly(run[name], true[name], allowed[name]) for name in off):
        return truth
    worst = max(gaps, key=lambda name: gaps[name] / allowed[name])
    epsilons = gaps[worst] / epsilon(dtype)
    found = Measured(name=worst, measure="frobenius", error=gaps[worst], allowed=allowed[worst], epsilons=epsilons)
    truth = replace(truth, first_forward=found)
    if found.right:
        return truth
    operator = differing_operator(_forward(trial, own, "float64"), _forward(trial, own, DTYPE), found.error)
    if not operator:
        return truth
    mine = trial.compute_anew(trial.reference.control, part="control", parts=1)
    known = [n for n in truth.tensors if _fits(mine, n, truth.tensors) and bool(mine[n].isfinite().all())]
    tensors = {**truth.tensors, **{name: mine[name].to(truth.tensors[name].dtype) for name in known}}
    begun = {name.removeprefix(INITIAL): mine[name].double() for name in mine if name.startswith(INITIAL)}
    return replace(truth, tensors=tensors, initial=begun, of_dtype=operator)


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


def _lower(trial: Trial, *, parts: int) -> Mapping[str, Tensor]:
    """A float32 run of the dense model; nothing where it has none."""
    try:
        return trial.compute_anew(trial.reference.control, trial.case.but(dtype=DTYPE), part="control", parts=parts)
    except (RequestError, ValueError):
        return {}


def _fits(run: Mapping[str, Tensor], name: str, truth: Mapping[str, Tensor]) -> bool:
    return name in run and name in truth and run[name].shape == truth[name].shape


def _theory(truth: Mapping[str, Tensor]) -> float:
    """The relative error of as many sums in a row as there are parameters, of as many terms as their longest dim."""
    shapes = [tensor.shape for name, tensor in truth.items() if kind_of(name) in ("grad", "param")]
    names = {name.partition("/")[2] for name in truth if kind_of(name) in ("grad", "param")}
    longest = max((size for shape in shapes for size in shape), default=1)
    return ROUNDING * epsilon(DTYPE) * math.sqrt(max(len(names), 1) * (longest + 1) / 2)


def _mostly(value: Tensor, truth: Tensor, allowed: float) -> bool:
    """Whether most elements are off by more than this, and not only those of some rows."""
    gap, size = (as_float64(value) - as_float64(truth)).abs(), float(as_float64(truth).square().mean().sqrt())
    return truth.numel() < _MANY or float((gap > allowed * size).double().mean()) > 0.5
