"""What an optimizer moved: an update is judged by the size of the movement, not by that of the parameter.

A step may be a millionth of a parameter. Half of it, or none, is no error beside the parameter's size. So of
`param_after/<step>/<name>` and `param/<name>` the difference to the value before is compared: with the truth's, by the
distance of the control runs' differences. An element may also be off by what storing it rounds. A parameter in bfloat16
without a wider copy loses steps below half a unit in its last place, and then nothing is decided.

Before step 0 stands the value with which training began; before a later one what was returned after the step before.
Where only the last values were returned, the movement is that of all steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of, step_of
from harness.checking.measures.many_tensors import kind_rms
from harness.checking.measures.measured import epsilon

MOVED = frozenset({"param", "param_after"})
"""Kinds of names of parameters after a step."""
INITIAL = "initial/"
"""Begin of the names under which a control run has the values of parameters before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """Movements of one parameter, in float64: the truth's, the ranks' (None where their value is missing), those of
    control runs and of amplified ones. `slack`: by how much storing may change each element.
    """

    truth: Tensor
    value: Tensor | None
    controls: tuple[Tensor, ...]
    amplified: tuple[Tensor, ...]
    slack: Tensor


def movement(evidence: Evidence, name: str) -> Movement | None:
    """The movement that made this tensor; None for other kinds, and where the value before it is not known."""
    values = evidence.merged.tensors
    started = _before(evidence, name, evidence.truth)
    own = _before(evidence, name, values)
    if started is None or (name in values and own is None):
        return None
    truth = evidence.truth[name].double()
    moved, unit = truth - started.double(), epsilon(stored_dtype(evidence, values.get(name, truth)))
    controls = _moves(evidence, name, evidence.controls)
    still = torch.stack([moved, *controls]).eq(0).all(0)  # what no run moves is not stored anew
    slack = truth.abs() * ~still * (unit * _steps(evidence, name))
    if own is not None and not _returned(evidence, name):  # ranks may begin with values in the case's dtype, or not
        slack += (own.double() - own.to(getattr(torch, evidence.case.dtype)).double()).abs()
    return Movement(
        truth=moved,
        value=values[name].double() - own.double() if name in values and own is not None else None,
        controls=controls,
        amplified=_moves(evidence, name, evidence.amplified),
        slack=slack,
    )


def sizes_of(evidence: Evidence, names: Iterable[str] | None = None) -> dict[str, float]:
    """The rms of each kind of these names of the truth (all), of movements where these are known."""
    names = evidence.truth if names is None else names
    return kind_rms({name: moved_truth(evidence, name) for name in names})


def moved_truth(evidence: Evidence, name: str) -> Tensor:
    """The truth's movement behind this name; its tensor where there is none."""
    truth = evidence.truth[name]
    started = _before(evidence, name, evidence.truth)
    return truth if started is None else truth.double() - started.double()


def stored_dtype(evidence: Evidence, tensor: Tensor) -> str:
    """The dtype in which a returned tensor was kept: its own, or the case's where that holds each of its numbers."""
    own, case = str(tensor.dtype).removeprefix("torch."), evidence.case.dtype
    if not tensor.is_floating_point() or tensor.dtype.itemsize <= getattr(torch, case).itemsize:
        return case
    narrow = tensor.to(getattr(torch, case))
    return case if torch.equal(narrow.to(tensor.dtype), tensor) else own


def _steps(evidence: Evidence, name: str) -> int:
    """Over how many steps the movement goes."""
    return 1 if _returned(evidence, name) else max(_step(evidence, name), 0) + 1


def _step(evidence: Evidence, name: str) -> int:
    return evidence.case.steps - 1 if kind_of(name) == "param" else step_of(name)


def _parameter(name: str) -> str:
    place = name.partition("/")[2]
    return place if kind_of(name) == "param" else place.partition("/")[2]


def _earlier(evidence: Evidence, name: str) -> str:
    """The name of this parameter's value before the step."""
    return f"param_after/{_step(evidence, name) - 1}/{_parameter(name)}"


def _moves(evidence: Evidence, name: str, runs: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, ...]:
    """The movements in these runs, of those that have both values."""
    pairs = [(run[name], _before(evidence, name, run)) for run in runs if name in run]
    return tuple(after.double() - before.double() for after, before in pairs if before is not None)


def _returned(evidence: Evidence, name: str) -> bool:
    """Whether the value before the step is one that is returned after each step."""
    return _step(evidence, name) > 0 and _earlier(evidence, name) in evidence.truth


def _before(evidence: Evidence, name: str, outcome: Mapping[str, Tensor]) -> Tensor | None:
    """The value of a parameter before the step that made `name`, in this outcome; None for other kinds."""
    if kind_of(name) not in MOVED:
        return None
    earlier, parameter = _earlier(evidence, name), _parameter(name)
    if _returned(evidence, name):
        return (evidence.states or {}).get(earlier, outcome.get(earlier))
    if _step(evidence, name) > 0 and kind_of(name) != "param":
        return None
    before = outcome.get(INITIAL + parameter, evidence.initial.get(parameter))
    if outcome is evidence.merged.tensors and evidence.controls:
        before = _rounded(evidence.controls[0].get(INITIAL + parameter), before, evidence.case.dtype)
    return before if before is not None and before.shape == evidence.truth[name].shape else None


def _rounded(control: Tensor | None, before: Tensor | None, dtype: str) -> Tensor | None:
    """The value with which a control run began, where it is one of the case's dtype: ranks begin with the same."""
    kept = control is not None and torch.equal(control.to(getattr(torch, dtype)).to(control.dtype), control)
    return control if kept else before
