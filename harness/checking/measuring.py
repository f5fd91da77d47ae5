"""How far one merged tensor is from the truth, by all that is known of rounding in its case.

An update is judged by the size of the movement, not by that of the parameter: a step may be a millionth of it. So of
`param_after/<step>/<name>` and `param/<name>` the difference to the value before is compared: with the truth's, by the
distance of the control runs' differences. An element may also be off by what storing it rounds. A parameter in bfloat16
without a wider copy loses steps below half a unit in its last place, and then nothing is decided. Before step 0 stands
the value with which training began; before a later one what was returned after the step before. Where only the last
values were returned, the movement is that of all steps. Other values of the parameters, such as their averages under a
word of the subject's own, are compared so too.
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

    Of a parameter the movement is compared (`movement_of`), where it is known.

    Where a control run overflows in a step, nothing of that step decides: an overflow is a matter of rounding. In lower
    precision rounding alone may change half of the gradients' norm, or of their mean. Then a few control runs do not
    bound the optimizer's results: LEAP times as much is allowed, and its square of their squares. A sum over tokens in
    an accumulator as narrow as a 16-bit dtype is allowed only where the tensor is wrong for a wider one.
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
    """The relative error that a tensor has in theory because its tokens are added up (see error_of_sums)."""
    kind = "param" if _is_moved(run, truth, name) else kind_of(name)
    if kind not in OVER_TOKENS or (kind in MOVED and not _is_moved(run, truth, name)):
        return 0.0
    unit = epsilon(run.dtype)
    return error_of_sums(kind, tokens_of(truth.tensors, run.case.micro), unit, narrow=narrow)


def _takes_leaps(run: RecordedRun, truth: Truth, name: str) -> bool:
    """Whether the optimizer made a tensor, in lower precision, of gradients that rounding alone changes by half."""
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
"""Kinds of names whose elements are sums over tokens -> their relative error in units of the sum's: a square has twice
as much. Of parameters the movement is meant, which is made of gradients."""


def error_of_sums(kind: str, tokens: int, epsilon: float, *, narrow: bool = False) -> float:
    """The relative error, root mean square, that a tensor of this kind has from adding up its tokens; 0 of other kinds.

    `epsilon` is that of the dtype. Sums are taken in float32 at least, or in the dtype itself where they are `narrow`.
    A result is off by at most half a unit in its last place. All significands m from 1 to 2 are taken to be equally
    likely on a logarithmic scale. Then the error is ROUNDING epsilons of the result in the root mean square:
    `sqrt(E[1/m^2] / 12)`, and `E[1/m^2] = 3 / (8 ln 2)`. Of n independent terms of mean zero the first k add up to
    sqrt(k) of them. When they are added one after the other the k-th rounding is one of that sum. So all of them come
    to `ROUNDING sqrt((2 + ... + n) / n)` epsilons of the whole.

    This is the worst order that kernels take. On a CPU torch's layer norm takes it for the gradients of its weight and
    bias, row by row, in one accumulator a thread. In bfloat16 and float16 the accumulator is of that dtype
    (aten/src/ATen/native/cpu/layer_norm_kernel.cpp). A matrix product adds in float32 at least, in blocks (a CPU) or
    one after the other (a GPU). `torch.sum` adds in a cascade, with an error of sqrt(log n). Source: Higham and Mary
    2019, doi:10.1137/18M1226312: errors of n roundings grow as sqrt(n).
    """
    if kind not in OVER_TOKENS or tokens < 2:
        return 0.0
    unit = epsilon if narrow else min(epsilon, _WIDE)
    return OVER_TOKENS[kind] * ROUNDING * unit * math.sqrt((tokens + 1) / 2 - 1 / tokens)


def tokens_of(truth: Mapping[str, Tensor], micro: int) -> int:
    """Tokens of a step on all data ranks, by the shapes of a truth; 1 where none of them shows it.

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
"""Known kinds of names that are no values of parameters."""
INITIAL = "initial/"
"""Begin of the names under which a control run has the values of parameters before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """Movements of one parameter, in float64: the truth's, the ranks' (None where their value is missing), those of
    control runs and of amplified ones. `stored` and `begun`: by how much storing may change each element, and rounding
    the first value, which control runs begin with.
    """

    truth: Numbers
    value: Numbers | None
    controls: tuple[Numbers, ...]
    amplified: tuple[Numbers, ...]
    stored: Numbers
    begun: Numbers | None


def movement_of(run: RecordedRun, truth: Truth, name: str) -> Movement | None:
    """The movement that made this tensor; None for other kinds, and where the value before it is not known."""
    values, true = run.tensors, truth.tensors[name]
    started = _value_before(run, truth, name, truth.tensors)
    own = _value_before(run, truth, name, values)
    if started is None or not _is_moved(run, truth, name):
        return None
    moved = compute(_subtract, true, started)
    controls = _movements_in_runs(run, truth, name, truth.controls.runs)
    unit = epsilon(stored_dtype(run, values.get(name, true))) * _count_steps(run, truth, name)
    first = None if _returns_each_step(run, truth, name) else own  # ranks may begin in the case's dtype
    return Movement(
        truth=moved,
        value=compute(_subtract, values[name], own) if name in values and own is not None else None,
        controls=controls,
        amplified=_movements_in_runs(run, truth, name, truth.controls.amplified),
        stored=compute(partial(_storing_error, unit), true, moved, *controls),
        begun=None if first is None else compute(partial(_error_of_start, run.case.dtype), first),
    )


def unless_zero(numbers: Numbers | None) -> Numbers | None:
    """The numbers; None where each of them is 0."""
    return numbers if numbers is not None and any(bool(block.any()) for block in blocks_of(numbers)) else None


def _subtract(after: Tensor, before: Tensor) -> Tensor:
    return as_float64(after) - as_float64(before)


def _storing_error(unit: float, true: Tensor, *moved: Tensor) -> Tensor:
    """How far storing takes an element of this size; what no run moves is not stored anew."""
    return as_float64(true).abs() * ~torch.stack(moved).eq(0).all(0) * unit


def _error_of_start(dtype: str, start: Tensor) -> Tensor:
    """What rounding the first value to this dtype adds."""
    return (as_float64(start) - _rounded(start, dtype)).abs()


def _rounded(tensor: Tensor, dtype: str) -> Tensor:
    """Its numbers as this dtype holds them; there are no complex ones narrower than float32."""
    kind = getattr(torch, dtype)
    return as_float64(tensor).to(torch.promote_types(kind, torch.float32) if tensor.is_complex() else kind).double()


def _is_moved(run: RecordedRun, truth: Truth, name: str) -> bool:
    """Whether the value before is known, of the truth and of what the ranks returned."""
    values = run.tensors
    known = _value_before(run, truth, name, truth.tensors) is not None
    return known and (name not in values or _value_before(run, truth, name, values) is not None)


def sizes_of(run: RecordedRun, truth: Truth, names: Iterable[str] | None = None) -> dict[str, float]:
    """The rms of each kind of these names of the truth (all), of movements where these are known."""
    names, tensors = truth.tensors if names is None else list(names), truth.tensors
    started = {name: before for name in names if (before := _value_before(run, truth, name, tensors)) is not None}
    sizes = kind_rms({name: tensors[name] for name in names if name not in started})
    squares: dict[str, list[tuple[float, int]]] = {}
    for name, before in started.items():
        square = sum(float(block.square().sum()) for block in blocks_of(compute(_subtract, tensors[name], before)))
        squares.setdefault(kind_of(name), []).append((square, before.numel()) if math.isfinite(square) else (0.0, 0))
    moved = {kind: (sum(s for s, _ in each), max(sum(n for _, n in each), 1)) for kind, each in squares.items()}
    if _SQUARES in sizes:  # what cancels in a gradient is as small in its square as its own square
        sizes[_SQUARES] *= SCALE_SHARE
    return sizes | {kind: math.sqrt(square / count) for kind, (square, count) in moved.items()}


def stored_dtype(run: RecordedRun, tensor: Tensor) -> str:
    """The dtype in which a returned tensor was kept: its own, or the case's where that holds each of its numbers."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    own, case = str(tensor.dtype).removeprefix("torch."), run.case.dtype
    if not tensor.is_floating_point() or tensor.dtype.itemsize <= getattr(torch, case).itemsize:
        return case
    narrow = tensor.to(getattr(torch, case))
    return case if torch.equal(narrow.to(tensor.dtype), tensor) else own


def _count_steps(run: RecordedRun, truth: Truth, name: str) -> int:
    """Over how many steps the movement goes."""
    return 1 if _returns_each_step(run, truth, name) else max(_step_of_name(run, name), 0) + 1


def _step_of_name(run: RecordedRun, name: str) -> int:
    step = -1 if kind_of(name) == "param" else step_of(name)
    return step if step >= 0 else run.case.steps - 1


def parameter_of_name(name: str) -> str:
    """The parameter of a state: "head" of "param/head" and of "exp_avg_after/0/head"."""
    place = name.partition("/")[2]
    return place if kind_of(name) == "param" or step_of(name) < 0 else place.partition("/")[2]


def _name_of_parameter(truth: Truth, name: str) -> str:
    """The name of the parameter beside this value: "param_after/0/head" of "ema_after/0/head", where there is one."""
    beside = f"param_after/{step_of(name)}/{parameter_of_name(name)}"
    return beside if beside in truth.tensors else f"param/{parameter_of_name(name)}"


def _earlier_name(run: RecordedRun, name: str) -> str:
    """The name of this parameter's value before the step."""
    kind = kind_of(name).removesuffix("_after")
    return f"{kind}_after/{_step_of_name(run, name) - 1}/{parameter_of_name(name)}"


def _movements_in_runs(
    run: RecordedRun, truth: Truth, name: str, runs: Sequence[Mapping[str, Tensor]]
) -> tuple[Numbers, ...]:
    """The movements in these runs, of those that have both values."""
    pairs = [(outcome[name], _value_before(run, truth, name, outcome)) for outcome in runs if name in outcome]
    return tuple(compute(_subtract, after, before) for after, before in pairs if before is not None)


def _returns_each_step(run: RecordedRun, truth: Truth, name: str) -> bool:
    """Whether the value before the step is one that is returned after each step."""
    return _step_of_name(run, name) > 0 and _earlier_name(run, name) in truth.tensors


def _value_before(run: RecordedRun, truth: Truth, name: str, outcome: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a parameter before the step that made `name`, in this outcome; None for other kinds.

    A kind of the subject's own, such as averages of parameters, is one where it moves, and stays so near to the value
    before that its smallest limit would hide half of the step.
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
    """The value with which a control run began, where rounding explains its distance from the truth's; else this."""
    if control is None or true is None or control.shape != true.shape:
        return true
    apart = distance(control, true).frobenius
    return control if apart <= CONTROL_FACTOR * epsilon(dtype) else true


def _find_rounded_start(control: Tensor | None, before: Tensor | None, dtype: str) -> Tensor | None:
    """The value with which a control run began, where it is one of the case's dtype: ranks begin with the same."""
    kept = control is not None and torch.equal(_rounded(control, dtype), as_float64(control))
    return control if kept else before
