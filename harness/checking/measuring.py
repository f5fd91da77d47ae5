"""How far one merged tensor is from the truth, and how far rounding may take it in its case.

A parameter after a step is judged by its movement, because a step may be a millionth of the parameter. The movement of
`param_after/<step>/<name>` or `param/<name>` is its difference from the value before: the initial value for step 0,
otherwise the value that was returned after the step before. If only the last values were returned, the movement is that
of all steps. Movements are compared like tensors, with the movements of control runs; an element may also be off by the
rounding of its storage. A parameter stored in bfloat16 alone loses steps below half a unit in its last place, and then
nothing is decided. A subject may return other values of parameters, such as averages of them, under a name of its own:
these are judged in the same way.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from shardproof.harness.checking.measures.distance import as_float64, distance
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS, is_state, kind_of, step_of
from shardproof.harness.checking.measures.many_tensors import Numbers, blocks_of, compute, kind_rms
from shardproof.harness.checking.measures.measured import FLOAT64_ALLOWED, SCALE_SHARE, Measured, epsilon
from shardproof.harness.checking.measures.tolerance import CONTROL_FACTOR, FLOOR_EPSILONS, LEAP, measure
from shardproof.harness.checking.records import RecordedRun, Truth

_MEANS, _SQUARES = "exp_avg_after", "exp_avg_sq_after"


def compare_with_truth(run: RecordedRun, truth: Truth, name: str, kind: float) -> Measured:
    """Compare a merged tensor with the truth, by all that is known of rounding; `kind` is the rms of its kind.

    For a parameter the movement is compared (`movement_of`), if it is known. The error of a sum over tokens is first
    that of a wide accumulator, and only if the tensor is wrong that of an accumulator of a 16-bit dtype.

    A wrong tensor decides nothing in two cases. If a control run overflows in its step, rounding alone may overflow. If
    rounding alone may change half of the gradients' norm or mean, control runs do not bound what the optimizer makes of
    them: this may be off by up to LEAP times the limit, and means of squares by LEAP squared times.
    """
    wide, narrow = theoretical_error_of_sums(run, truth, name), theoretical_error_of_sums(run, truth, name, narrow=True)
    result = _measure_tensor(run, truth, name, kind, wide)
    if not result.right and narrow > wide:
        result = _measure_tensor(run, truth, name, kind, narrow)
    if result.right:
        return result
    if _has_overflow(run, truth, name):
        return replace(result, allowed=math.inf, decidable=False)
    leap = LEAP ** (2 if kind_of(name) == _SQUARES else 1)
    return replace(result, allowed=leap * result.allowed, decidable=False) if _takes_leaps(run, truth, name) else result


def _measure_tensor(run: RecordedRun, truth: Truth, name: str, kind: float, summed_error: float) -> Measured:
    moved = movement_of(run, truth, name)
    slack: Numbers | None = truth.controls.adam_bound.get(name if moved is None else _name_of_parameter(truth, name))
    stored: Numbers | None = None
    value: Numbers = run.tensors[name]
    true: Numbers = truth.tensors[name]
    controls: Sequence[Numbers] = [control[name] for control in truth.controls.runs if name in control]
    amplified: Sequence[Numbers] = [control[name] for control in truth.controls.amplified if name in control]
    if moved is not None and moved.value is not None:
        value, true, controls, amplified = moved.value, moved.truth, moved.controls, moved.amplified
        stored = unless_zero(moved.stored)
        begun = unless_zero(moved.begun)
        slack = begun if slack is None else slack if begun is None else compute(torch.add, slack, begun)
    states = kind_of(name) in NUMERIC_KINDS["update"]
    return measure(
        name,
        value,
        true,
        dtype=run.dtype,
        kept=stored_dtype(run, run.tensors[name]) if states else "",
        lower=run.lower.dtype if name in run.lower.names else "",
        controls=controls,
        amplified=amplified,
        controlled=truth.controls.distances.get(name),
        relu_flips=[flip[name] for flip in truth.controls.relu_flips if name in flip],
        slack=slack,
        stored=stored,
        kind=kind,
        summed=summed_error,
    )


def theoretical_error_of_sums(run: RecordedRun, truth: Truth, name: str, *, narrow: bool = False) -> float:
    """The theoretical relative error of a tensor whose elements are sums over tokens (`error_of_sums`), else 0."""
    kind = "param" if _is_moved(run, truth, name) else kind_of(name)
    if kind not in OVER_TOKENS or (kind in MOVED and not _is_moved(run, truth, name)):
        return 0.0
    unit = epsilon(run.dtype)
    return error_of_sums(kind, tokens_of(truth.tensors, run.case.micro), unit, narrow=narrow)


def _takes_leaps(run: RecordedRun, truth: Truth, name: str) -> bool:
    """Whether the optimizer computed a tensor from gradients that rounding alone changes by half."""
    kind, _, place = name.partition("/")
    if run.dtype == "float64" or not (kind in NUMERIC_KINDS["update"] or _is_moved(run, truth, name)):
        return False
    step = _step_of_name(run, name)
    made_of = (f"grad_norm/{step}", *((f"{_MEANS}/{place}",) if kind == _SQUARES else ()))
    known = [source for source in made_of if source in truth.tensors and source in run.tensors]
    sources = (compare_with_truth(run, truth, source, 0.0) for source in known)
    return any(source.right and not source.decidable for source in sources)


def _has_overflow(run: RecordedRun, truth: Truth, name: str) -> bool:
    """Whether a loss or gradient norm of a control run is not finite, in the step of this tensor or before it."""
    whole = {"act": 0, "act_grad": 0, "grad": 0, "param": run.case.steps - 1, "saved": run.case.steps - 1}
    last = whole.get(kind_of(name), step_of(name))
    names = [f"{kind}/{step}" for step in range(last + 1) for kind in ("loss", "grad_norm")]
    numbers = (control[key] for control in truth.controls.runs for key in names if key in control)
    return not all(map(math.isfinite, itertools.chain.from_iterable(x.reshape(-1).tolist() for x in numbers)))


ROUNDING = math.sqrt(3 / (8 * math.log(2)) / 12)
"""The root mean square error of one rounding, in epsilons of its result."""
_WIDE = torch.finfo(torch.float32).eps
"""Epsilon of the narrowest accumulator of a matrix product."""
OVER_TOKENS: Mapping[str, float] = {
    **{"grad": 1.0, "exp_avg_after": 1.0, "exp_avg_sq_after": 2.0},
    **{"param": 1.0, "param_after": 1.0},
}
"""Kinds of names whose elements are sums over tokens -> their relative error in units of that of a sum, twice as much
for a square. For parameters it is the error of the movement, which is made of gradients."""


def error_of_sums(kind: str, tokens: int, epsilon: float, *, narrow: bool = False) -> float:
    """The relative error, root mean square, of a tensor of this kind from adding up its tokens; 0 for other kinds.

    `epsilon` is that of the dtype. Sums are taken in float32 at least, or in the dtype itself where they are `narrow`.
    A result is off by at most half a unit in its last place. If all significands m from 1 to 2 are equally likely on a
    logarithmic scale, the root mean square of the error is ROUNDING epsilons of the result: `sqrt(E[1/m^2] / 12)` with
    `E[1/m^2] = 3 / (8 ln 2)`. The sum of the first k of n independent terms with mean zero is about sqrt(k) times one
    term, and the k-th addition rounds that sum. So the n - 1 additions come to `ROUNDING sqrt((2 + ... + n) / n)`
    epsilons of the whole.

    This is the worst order in which kernels add. On a CPU torch's layer norm adds so for the gradients of its weight
    and bias, row by row, in one accumulator a thread. In bfloat16 and float16 the accumulator has that dtype
    (aten/src/ATen/native/cpu/layer_norm_kernel.cpp). A matrix product adds in float32 at least, in blocks (a CPU) or
    one after the other (a GPU). `torch.sum` adds in a cascade, with an error of sqrt(log n). Source: Higham and Mary
    2019, doi:10.1137/18M1226312: errors of n roundings grow as sqrt(n).
    """
    if kind not in OVER_TOKENS or tokens < 2:
        return 0.0
    unit = epsilon if narrow else min(epsilon, _WIDE)
    return OVER_TOKENS[kind] * ROUNDING * unit * math.sqrt((tokens + 1) / 2 - 1 / tokens)


def tokens_of(truth: Mapping[str, Tensor], micro: int) -> int:
    """The number of tokens of a step on all data ranks, by the shapes of a truth; 1 if no shape shows it.

    `micro` is the number of micro-batches of a step: activations are those of the first one.
    """
    counted = [int(truth["tokens/0"])] if "tokens/0" in truth else []
    counted += [_count_rows(truth["logits/0"])] if "logits/0" in truth else []
    if not counted:
        counted = [micro * _count_rows(x) for name, x in truth.items() if name.startswith("act/") and x.dim() in (2, 3)]
    return max(counted, default=1)


def _count_rows(x_TE: Tensor) -> int:
    return math.prod(x_TE.shape[:-1])


MOVED = frozenset({"param", "param_after"})
"""Kinds of names of parameters after a step."""
_OTHER_KINDS = frozenset(kind for kinds in NUMERIC_KINDS.values() for kind in kinds) - MOVED
"""Known kinds of names that are not values of parameters."""
INITIAL = "initial/"
"""The beginning of names under which a control run keeps parameters as they were before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """Movements of one parameter, in float64: of the truth, the ranks (None without both values) and the control runs.

    Two bounds say how far each element may be off: `stored`, because its value is rounded when it is stored, and
    `begun`, because the ranks may have begun with a rounded value (None if the movement begins later).
    """

    truth: Numbers
    value: Numbers | None
    controls: tuple[Numbers, ...]
    amplified: tuple[Numbers, ...]
    stored: Numbers
    begun: Numbers | None


def movement_of(run: RecordedRun, truth: Truth, name: str) -> Movement | None:
    """The movement that made this tensor; None if it is no parameter, or if the value before is unknown."""
    values, true = run.tensors, truth.tensors[name]
    started = _value_before(run, truth, name, truth.tensors)
    own = _value_before(run, truth, name, values)
    if started is None or not _is_moved(run, truth, name):
        return None
    moved = compute(_subtract, true, started)
    controls = _movements_in_runs(run, truth, name, truth.controls.runs)
    unit = epsilon(stored_dtype(run, values.get(name, true))) * _count_steps(run, truth, name)
    first = None if _returns_each_step(run, truth, name) else own  # ranks may begin with values in the case's dtype
    return Movement(
        truth=moved,
        value=compute(_subtract, values[name], own) if name in values and own is not None else None,
        controls=controls,
        amplified=_movements_in_runs(run, truth, name, truth.controls.amplified),
        stored=compute(partial(_storing_error, unit), true, moved, *controls),
        begun=None if first is None else compute(partial(_error_of_start, run.case.dtype), first),
    )


def unless_zero(numbers: Numbers | None) -> Numbers | None:
    """The numbers; None if all of them are 0."""
    return numbers if numbers is not None and any(bool(block.any()) for block in blocks_of(numbers)) else None


def _subtract(after: Tensor, before: Tensor) -> Tensor:
    return as_float64(after) - as_float64(before)


def _storing_error(unit: float, true: Tensor, *moved: Tensor) -> Tensor:
    """The rounding of an element of this size when it is stored; 0 for elements that no run moves."""
    return as_float64(true).abs() * ~torch.stack(moved).eq(0).all(0) * unit


def _error_of_start(dtype: str, start: Tensor) -> Tensor:
    """The rounding of the first value in this dtype."""
    return (as_float64(start) - _rounded(start, dtype)).abs()


def _rounded(tensor: Tensor, dtype: str) -> Tensor:
    """The numbers rounded to this dtype; complex numbers to complex64 at the least."""
    kind = getattr(torch, dtype)
    return as_float64(tensor).to(torch.promote_types(kind, torch.float32) if tensor.is_complex() else kind).double()


def _is_moved(run: RecordedRun, truth: Truth, name: str) -> bool:
    """Whether the value before the step is known, both of the truth and, if ranks returned the tensor, of the ranks."""
    values = run.tensors
    known = _value_before(run, truth, name, truth.tensors) is not None
    return known and (name not in values or _value_before(run, truth, name, values) is not None)


def sizes_of(run: RecordedRun, truth: Truth, names: Iterable[str] | None = None) -> dict[str, float]:
    """The rms of each kind of these tensors of the truth, by default of all; for parameters that of their movements."""
    names, tensors = truth.tensors if names is None else list(names), truth.tensors
    started = {name: before for name in names if (before := _value_before(run, truth, name, tensors)) is not None}
    sizes = kind_rms({name: tensors[name] for name in names if name not in started})
    squares: dict[str, list[tuple[float, int]]] = {}
    for name, before in started.items():
        square = sum(float(block.square().sum()) for block in blocks_of(compute(_subtract, tensors[name], before)))
        squares.setdefault(kind_of(name), []).append((square, before.numel()) if math.isfinite(square) else (0.0, 0))
    moved = {kind: (sum(s for s, _ in each), max(sum(n for _, n in each), 1)) for kind, each in squares.items()}
    if _SQUARES in sizes:  # the share of a kind's rms is squared too
        sizes[_SQUARES] *= SCALE_SHARE
    return sizes | {kind: math.sqrt(square / count) for kind, (square, count) in moved.items()}


def stored_dtype(run: RecordedRun, tensor: Tensor) -> str:
    """The dtype in which a returned tensor was stored: the case's if that holds all of its numbers, else its own."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    own, case = str(tensor.dtype).removeprefix("torch."), run.case.dtype
    if not tensor.is_floating_point() or tensor.dtype.itemsize <= getattr(torch, case).itemsize:
        return case
    narrow = tensor.to(getattr(torch, case))
    return case if torch.equal(narrow.to(tensor.dtype), tensor) else own


def _count_steps(run: RecordedRun, truth: Truth, name: str) -> int:
    """The number of steps of which a movement consists."""
    return 1 if _returns_each_step(run, truth, name) else max(_step_of_name(run, name), 0) + 1


def _step_of_name(run: RecordedRun, name: str) -> int:
    step = -1 if kind_of(name) == "param" else step_of(name)
    return step if step >= 0 else run.case.steps - 1


def parameter_of_name(name: str) -> str:
    """The parameter of a state: "head" of "param/head" and of "exp_avg_after/0/head"."""
    place = name.partition("/")[2]
    return place if kind_of(name) == "param" or step_of(name) < 0 else place.partition("/")[2]


def _name_of_parameter(truth: Truth, name: str) -> str:
    """The parameter of this value after the same step, "param_after/0/head" for "ema_after/0/head", or at the end."""
    beside = f"param_after/{step_of(name)}/{parameter_of_name(name)}"
    return beside if beside in truth.tensors else f"param/{parameter_of_name(name)}"


def _earlier_name(run: RecordedRun, name: str) -> str:
    """The name of this parameter's value before the step."""
    kind = kind_of(name).removesuffix("_after")
    return f"{kind}_after/{_step_of_name(run, name) - 1}/{parameter_of_name(name)}"


def _movements_in_runs(
    run: RecordedRun, truth: Truth, name: str, runs: Sequence[Mapping[str, Tensor]]
) -> tuple[Numbers, ...]:
    """The movements in these runs, as far as they have both values."""
    pairs = [(outcome[name], _value_before(run, truth, name, outcome)) for outcome in runs if name in outcome]
    return tuple(compute(_subtract, after, before) for after, before in pairs if before is not None)


def _returns_each_step(run: RecordedRun, truth: Truth, name: str) -> bool:
    """Whether the value before the step is the one that was returned after the step before."""
    return _step_of_name(run, name) > 0 and _earlier_name(run, name) in truth.tensors


def _value_before(run: RecordedRun, truth: Truth, name: str, outcome: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a parameter before the step that made `name`, in this outcome; None for other kinds.

    A kind of the subject's own, such as an average of parameters, counts as a value of parameters if it moves by less
    than twice the smallest limit: compared as it is, half of its step could be wrong unnoticed.
    """
    before = _find_value_before(run, truth, name, outcome)
    if before is None or kind_of(name) in MOVED:
        return before
    true, started = truth.tensors[name], _find_value_before(run, truth, name, truth.tensors)
    begun = truth.initial.get(parameter_of_name(name))
    if started is None or not true.is_floating_point() or (begun is not None and torch.equal(true, begun)):
        return None
    least = FLOAT64_ALLOWED if run.dtype == "float64" else FLOOR_EPSILONS["frobenius"] * epsilon(run.dtype)
    return before if distance(true, started).frobenius < 2 * least else None


def _find_value_before(run: RecordedRun, truth: Truth, name: str, outcome: Mapping[str, Tensor]) -> Tensor | None:
    if kind_of(name) in _OTHER_KINDS:
        return None
    earlier, parameter = _earlier_name(run, name), parameter_of_name(name)
    if _returns_each_step(run, truth, name):
        return (truth.controls.states or {}).get(earlier, outcome.get(earlier))
    if _step_of_name(run, name) > 0 and is_state(name):
        return None
    before = _likely_start(outcome.get(INITIAL + parameter), truth.initial.get(parameter), run.case.dtype)
    if outcome is run.tensors and truth.controls.runs:
        before = _find_rounded_start(truth.controls.runs[0].get(INITIAL + parameter), before, run.case.dtype)
    return before if before is not None and before.shape == truth.tensors[name].shape else None


def _likely_start(control: Tensor | None, true: Tensor | None, dtype: str) -> Tensor | None:
    """The initial value of a control run if rounding explains its distance from the truth's; else the truth's."""
    if control is None or true is None or control.shape != true.shape:
        return true
    apart = distance(control, true).frobenius
    return control if apart <= CONTROL_FACTOR * epsilon(dtype) else true


def _find_rounded_start(control: Tensor | None, before: Tensor | None, dtype: str) -> Tensor | None:
    """The initial value of a control run if its numbers fit the case's dtype, like those of ranks; else `before`."""
    kept = control is not None and torch.equal(_rounded(control, dtype), as_float64(control))
    return control if kept else before
