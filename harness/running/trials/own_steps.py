"""Judges updates by the gradients that the ranks returned: whether the optimizer made the right step from them.

In a lower precision the update of the ranks is compared with that of the truth, which follows from other gradients: its
own. Rounding moves gradients by some percent in bfloat16, so this comparison allows as much. But if the ranks returned
the gradients of the first step, the update that must follow from these is known. To find it the truth is computed
again, and the first step of each of its optimizers takes the gradients of the ranks.

How the truth uses its gradients is observed: its optimizer takes what the truth returns as `grad/<name>`, or all of
these times one factor. The factor may be a constant, or follow from a norm of the gradients, as in clipping. Each of
these readings is tried, and a step is wrong only if all of them find it wrong. Nothing is decided if the truth uses its
gradients in another way, if its step is not made by an optimizer of torch, or if gradients were not returned.

The optimizer of the ranks need not take exactly what they returned: gradients may be rounded once more, to the dtype in
which ranks store them, and an optimizer may amplify rounding. So a step that looks wrong is judged again by control
runs. In some the gradients move by such a rounding, in others by CONTROL_FACTOR times as much, and in some the
optimizers round in the case's dtype. Gradients returned in float32 count as stored in float32, even in a 16-bit case.
"""

import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardproof.harness.checking.checks import Check, run_checks
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import NUMERIC_KINDS, kind_of, step_of
from shardproof.harness.checking.measures.measured import epsilon
from shardproof.harness.checking.measures.tolerance import CONTROL_FACTOR
from shardproof.harness.checking.measuring import parameter_of_name, stored_dtype
from shardproof.harness.checking.records import Controls, Evidence, RecordedRun
from shardproof.harness.errors import MachineError, RequestError
from shardproof.harness.running.trials.lower_precision import Found, wrong_of
from shardproof.harness.running.trials.trial import Function, Trial
from shardproof.harness.verdicts.facts import state_fact

_UPDATE = "update"
_EXACT = 1e-12
"""A gradient in float64 is a multiple of another one, and two factors are equal, if they differ by less than this."""
_MOVED_RUNS = 2
_NORMS = 2.0, 0.0, math.inf
"""Norms of gradients from which a factor may follow, the usual one first; 0 stands for a constant factor."""


def judge_own_steps(trial: Trial, found: Found, checks: Mapping[str, Check]) -> Found:
    """The findings after the first step was judged by the gradients that the ranks returned.

    Unchanged in float64, whose limits are narrow anyway, and if something is wrong already.
    """
    run, truth = found[0].run, found[0].truth
    first = [name for name in truth.tensors if name in run.tensors and _of_first_step(trial, name)]
    if run.dtype == "float64" or _UPDATE not in found[1] or not first or wrong_of(found[1]):
        return found
    judged = found
    try:
        for norm in _NORMS:
            taken = TakenGradients(returned=_gradients(truth.tensors), given=_gradients(run.tensors), norm=norm)
            judged = _judge_steps(trial, found, checks[_UPDATE], taken)
            if judged is found or not taken.is_scaled:
                break
    except (MachineError, RequestError):  # with the gradients of the ranks the truth may not finish
        return found
    return judged


def _judge_steps(trial: Trial, found: Found, check: Check, taken: "TakenGradients") -> Found:
    evidence, findings = found
    run, truth = evidence.run, evidence.truth
    stepped = trial.compute_anew(taken.given_to(trial.reference.truth))
    names = {name for name in stepped.keys() & run.tensors.keys() if _of_first_step(trial, name)}
    names = {name for name in names if parameter_of_name(name) in taken.names}
    if not names:
        return found

    def judge(controls: Controls) -> tuple[Evidence, Finding | None]:
        known = replace(truth, tensors={name: stepped[name] for name in names}, controls=controls)
        judged = replace(evidence, truth=known)
        return judged, run_checks(judged, {_UPDATE: check}).get(_UPDATE)

    _, finding = judge(Controls())  # nearly every right step needs no control runs
    if finding is None or not finding.wrong:
        return found
    least = epsilon(run.dtype) if taken.is_scaled else 0.0  # the norm behind a factor is known up to rounding
    units = {name: max(_unit(run, f"grad/{name}"), least) for name in taken.names}
    moved = [taken.moved(seed, units) for seed in range(_MOVED_RUNS)]
    runs = [
        trial.compute_anew(one.given_to(function), part="control")
        for one in moved
        for function in (trial.reference.control, trial.reference.truth)
    ]
    more = [
        taken.moved(_MOVED_RUNS + seed, {name: CONTROL_FACTOR * unit for name, unit in units.items()})
        for seed in range(_MOVED_RUNS)
    ]
    amplified = [trial.compute_anew(one.given_to(trial.reference.truth), part="control") for one in more]
    judged, finding = judge(Controls(runs=tuple(runs), amplified=tuple(amplified)))
    if finding is None or not finding.wrong:
        return found
    facts = (*finding.facts, state_fact("of_own_gradients"))
    wrong = replace(findings[_UPDATE], verdict=finding.verdict, facts=facts, worst=finding.worst)
    wrong = replace(wrong, wrong=finding.wrong, names=finding.names)
    tensors = {**truth.tensors, **judged.truth.tensors}
    evidence = replace(evidence, truth=replace(truth, tensors=tensors, controls=judged.truth.controls))
    return evidence, {**findings, _UPDATE: wrong}


def _gradients(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of parameters, by name."""
    return {name.partition("/")[2]: tensor for name, tensor in tensors.items() if kind_of(name) == "grad"}


def _unit(run: RecordedRun, name: str) -> float:
    """Epsilon of the narrowest dtype in which a rank stores a part of this tensor."""
    parts = [block.local for outcome in run.outcomes for block in outcome.get(name, ())]
    return max((epsilon(stored_dtype(run, part)) for part in parts), default=epsilon(run.dtype))


def _of_first_step(trial: Trial, name: str) -> bool:
    """Whether a tensor is a result of the first step."""
    if kind_of(name) == "param":
        return bool(trial.case.steps == 1)
    return kind_of(name) in NUMERIC_KINDS[_UPDATE] and step_of(name) == 0


@dataclass(kw_only=True, slots=True)
class TakenGradients:
    """Gradients that the first steps of a truth's optimizers take in place of its own.

    `returned` are the gradients that the truth returns, `given` those of the ranks, both by parameter. `places` fills
    up as optimizers step: (number of the optimizer, number of its parameter) -> the name of that parameter, and the
    factor by which its gradient is multiplied. A factor other than 1 is taken to follow from this `norm` (_NORMS).
    """

    returned: Mapping[str, Tensor]
    given: Mapping[str, Tensor]
    norm: float = 0.0
    places: dict[tuple[int, int], tuple[str, float]] = field(default_factory=dict)
    known: bool = False
    is_scaled: bool = False

    @property
    def names(self) -> frozenset[str]:
        """The parameters whose gradients are taken."""
        return frozenset(name for name, _ in self.places.values())

    def moved(self, seed: int, units: Mapping[str, float]) -> "TakenGradients":
        """The same gradients, each element moved by a random part of a rounding of this relative size."""
        generator = torch.Generator().manual_seed(seed)

        def move(x: Tensor, unit: float) -> Tensor:
            part = torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5
            return x.to(torch.promote_types(x.dtype, torch.float64)) * (1 + unit * part)

        given = {name: move(self.given[name], unit) for name, unit in units.items()}
        return TakenGradients(returned=self.returned, given=given, places=self.places, known=True)

    def given_to(self, function: Function) -> Function:
        """The reference as a function in which the first steps of optimizers take these gradients."""

        def compute(*arguments: Any, **words: Any) -> Mapping[str, Tensor]:
            with self._in_place():
                return function(*arguments, **words)

        return compute

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        threads, optimizers = set[int](), dict[int, torch.optim.Optimizer]()

        def take(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            threads.add(threading.get_ident())
            if len(threads) > 1 or id(optimizer) in optimizers:  # a later step, or ranks of which each has only a part
                return
            number = len(optimizers)
            optimizers[id(optimizer)] = optimizer  # kept alive, so that no other one gets its id
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            if not self.known:
                self._recognise(number, parameters)
            for index, parameter in enumerate(parameters):
                name, factor = self.places.get((number, index), ("", 1.0))
                if name and parameter.grad is not None:
                    with torch.no_grad():
                        parameter.grad.copy_(self.given[name] * factor)

        handle = register_optimizer_step_pre_hook(take)
        try:
            yield
        finally:
            handle.remove()
            self.known = True
            if len(threads) > 1:
                self.places.clear()

    def _recognise(self, number: int, parameters: list[Tensor]) -> None:
        """Note which returned gradients an optimizer takes. Note nothing if it takes one that was not returned."""
        found: dict[tuple[int, int], tuple[str, float]] = {}
        for index, parameter in enumerate(parameters):
            gradient = parameter.grad
            if gradient is None or not bool(gradient.any()):
                continue
            names = [name for name, own in self.returned.items() if _factor(gradient, own) is not None]
            if len(names) != 1 or self.given.get(names[0], gradient[:0]).shape != gradient.shape:
                return
            found[number, index] = names[0], _factor(gradient, self.returned[names[0]]) or 0.0
        factors = [factor for _, factor in found.values()]
        if not found or max(factors) - min(factors) > _EXACT * max(factors) or not all(self._is_finite(found)):
            return
        scaled = abs(factors[0] - 1) > _EXACT
        self.is_scaled = self.is_scaled or scaled
        norms = [self._norm_of([own[name] for name, _ in found.values()]) for own in (self.returned, self.given)]
        by = norms[0] / norms[1] if scaled and norms[1] > 0 else 1.0
        self.places |= {place: (name, factor * by) for place, (name, factor) in found.items()}

    def _norm_of(self, gradients: list[Tensor]) -> float:
        """The norm of all of these gradients; 1 if the factor is a constant."""
        each = torch.stack([torch.linalg.vector_norm(gradient.double(), self.norm or 2.0) for gradient in gradients])
        return float(torch.linalg.vector_norm(each, self.norm)) if self.norm else 1.0

    def _is_finite(self, found: Mapping[tuple[int, int], tuple[str, float]]) -> Iterator[bool]:
        return (bool(self.given[name].isfinite().all()) for name, _ in found.values())


def _factor(gradient: Tensor, own: Tensor) -> float | None:
    """The factor by which a gradient is a multiple of another one; None if it is not."""
    if gradient.shape != own.shape or not gradient.is_floating_point() or not own.is_floating_point():
        return None
    if torch.equal(gradient, own.to(gradient.dtype)):
        return 1.0
    size, wide = float(own.double().norm()), gradient.double()
    factor = float(wide.norm()) / size if size else 0.0
    near = factor > 0 and bool((wide - own.double() * factor).norm() <= _EXACT * wide.norm())
    return factor if near else None
