"""How far the scaled gradients of one step reach, whatever parts an implementation computes and adds them in.

    least   some tensor of float16 holds a number of at least this size: above float16 the step is skipped, surely
    bound   no tensor of float16 holds a larger number: below float16 no step is skipped

No part of a sum is larger than the sum of its terms' sizes (the triangle inequality). Two facts say what the terms are.
A matrix product, or a sum of rows, of one rank adds up in float32 and is rounded once. Its terms are the micro-batches'
gradients, and their rows only where ranks share rows. A look-up adds the rows of its gradient in the table's dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.language.modes import MODES

_COLUMNS_AND_ROWS = frozenset({"wqkv", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "w13"})
Address = tuple[int, tuple[int, ...]]


@dataclass(slots=True, kw_only=True)
class Reach:
    """Gradients of a step, met one after the other; `reference.training.terms` has arithmetic that meets terms.

    `finite`: all parameters' gradients are. Sizes are of scaled gradients.
    """

    case: Case
    finite: bool = True
    _logits: float = 0.0
    _inside: float = 0.0
    _before: dict[str, Tensor] = field(default_factory=dict)
    _parts: dict[str, float] = field(default_factory=dict)
    _inputs: dict[Address, Tensor] = field(default_factory=dict)
    _terms: dict[Address, Tensor] = field(default_factory=dict)
    _sums: dict[Address, Tensor] = field(default_factory=dict)

    def meet_logits(self, gradient: Tensor) -> None:
        """Count the gradient of a micro-batch's logits, held as it is by whoever has the logits."""
        self._logits = max(self._logits, _size(gradient))

    def meet_inside(self, gradient: Tensor) -> None:
        """Count a gradient inside the model, or sizes that no part of it exceeds."""
        self._inside = max(self._inside, _size(gradient))

    def meet_input(self, x: Tensor, sizes: Tensor) -> None:
        """Count the sizes of the terms of the gradient of x, which several linears may read."""
        self.meet_inside(_put(self._inputs, x, sizes))

    def meet_terms(self, parameter: Tensor, sizes: Tensor) -> None:
        """Count the sizes of the terms of a parameter's gradient, one for every row that uses it."""
        _put(self._terms, parameter, sizes)

    def meet_sums(self, parameters: Mapping[str, Tensor]) -> None:
        """Count the parameters' gradients, added up so far: the last micro-batch's are what came since."""
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            summed, address = parameter.grad.detach().clone(), _address(parameter)
            part = summed - self._before[name] if name in self._before else summed
            self.finite = self.finite and bool(torch.isfinite(summed).all())
            self._parts[name] = max(self._parts.get(name, 0.0), _size(part))
            self._before[name] = summed
            terms = self._terms.pop(address, None)
            if not self._is_widened(name):
                self._add(address, part.abs() if terms is None or self._is_whole(name) else terms)
        for address, terms in self._terms.items():  # of experts, which are views of their bank
            self._add(address, terms)
        self._terms.clear()
        self._inputs.clear()

    def _add(self, address: Address, terms: Tensor) -> None:
        former = self._sums.get(address)
        if former is None:
            self._sums[address] = terms
        else:
            self._sums[address] = former + terms if self._adds_up else torch.maximum(former, terms)

    @property
    def least(self) -> float:
        """Some tensor of float16 holds a number of at least this size."""
        of_parameters = map(self._least_of, self._before)
        return max(self._logits, *of_parameters)

    @property
    def bound(self) -> float:
        """No tensor of float16 holds a larger number."""
        case = self.case
        kept = 1 - max(case.dropout, case.attention_dropout)  # what a mask drops is scaled before it is dropped
        experts = max(1, case.top_k) if case.experts else 1  # a token's gradient is the sum of its experts'
        return max(self._logits, self._inside * experts / float(kept), *map(_size, self._sums.values()))

    def _least_of(self, name: str) -> float:
        """A sum of n parts has a part that is at least an n-th of it."""
        case = self.case
        if case.grad_dtype == "model":
            return _size(self._before[name])
        if case.experts or (case.wgrad != "plain" and self._before[name].dim() > 1):  # ranks of experts mix data ranks
            return 0.0
        readers = 2 if name.startswith(("embedding", "head")) and (case.tied or case.prediction_depth) else 1
        return self._parts[name] / (1 if self._is_whole(name) else readers * case.tp * case.cp)

    def _is_whole(self, name: str) -> bool:
        """Whether one rank has all rows of a micro-batch from which this parameter's gradient comes, each once.

        Context ranks, isp and dispatchers of experts share rows; with sequence parallelism column and row linears are
        gathered, and others are not. Heads are shared by all. A table is looked up, or read twice.
        """
        case, mode, parts = self.case, MODES[self.case.mode], name.split(".")
        again = parts[0] == "embedding" or (parts[0] == "head" and case.prediction_depth > 0)
        if case.cp > 1 or mode.gathers_weights or case.experts or again:
            return False
        return case.tp == 1 or _is_linear(name) or not (mode.sequence or parts[-2] in ("q_norm", "k_norm"))

    def _is_widened(self, name: str) -> bool:
        """Whether the products for this gradient are in float32 from the start."""
        case = self.case
        linear = _is_linear(name) and not (case.experts or name.startswith("prediction"))
        return case.wgrad != "plain" and case.grad_dtype == "float32" and linear

    @property
    def _adds_up(self) -> bool:
        """Whether float16 holds sums of several micro-batches: of data ranks too where they share weights."""
        case = self.case
        return bool(case.grad_dtype == "model" or case.experts or MODES[case.mode].gathers_weights)


def _is_linear(name: str) -> bool:
    parts = name.split(".")
    return parts[-1] == "weight" and (parts[-2] in _COLUMNS_AND_ROWS or name == "head.weight")


def _put(sums: dict[Address, Tensor], tensor: Tensor, sizes: Tensor) -> Tensor:
    address = _address(tensor)
    sums[address] = total = sums[address] + sizes if address in sums else sizes
    return total


def _address(parameter: Tensor) -> Address:
    return parameter.data_ptr(), tuple(parameter.shape)


def _size(gradient: Tensor) -> float:
    return float(gradient.abs().max()) if gradient.numel() else 0.0
