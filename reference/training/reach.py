"""How far the scaled gradients of one step reach, whatever parts an implementation computes and adds them in.

    held    some tensor of float16 holds a number of at least this size: above float16 the step is skipped, surely
    bound   no tensor of float16 holds a larger number: below float16 no step is skipped

A logit's gradient is held as it is, that of a module's output as a sum of ranks' parts. A parameter's gradient is held
whole where gradients travel in float16 (`grad_dtype=model`). In float32 only a micro-batch's parts are: one of n parts
is at least an n-th of the whole. A sum over some of the micro-batches is at most the sum of what each of them has at
most (the triangle inequality). The control run adds them all in float16, whatever `grad_dtype` is, so `bound` is of
such sums.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference.case import Case
from reference.language.modes import MODES

_OF_A_PART = 2.0
"""A rank's part of a gradient (of some tokens, of some heads) is at most this many times the whole."""
_BETWEEN_OUTPUTS = 4.0
"""Gradients between two outputs, or a rank's part of one, are at most this many times as large as those seen."""


@dataclass(slots=True, kw_only=True)
class Reach:
    """Largest scaled gradients, met one after the other; NaN and infinity stay."""

    case: Case
    _logits: float = 0.0
    _outputs: float = 0.0
    _before: dict[str, Tensor] = field(default_factory=dict)
    _parts: dict[str, float] = field(default_factory=dict)
    _sums: dict[str, float] = field(default_factory=dict)

    def meet_logits(self, gradient: Tensor) -> None:
        """Count the gradient of a micro-batch's logits."""
        self._logits = _larger(self._logits, gradient)

    def meet_output(self, gradient: Tensor) -> None:
        """Count the gradient of a module's output."""
        self._outputs = _larger(self._outputs, gradient)

    def meet_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Count the parameters' gradients, added up so far: the last micro-batch's are what came since."""
        for name, summed in sums.items():
            part = summed - self._before[name] if name in self._before else summed
            size, former = _size(part), self._parts.get(name, 0.0)
            self._parts[name] = max(former, size)
            self._sums[name] = self._sums.get(name, 0.0) + size
            self._before[name] = summed.clone()

    @property
    def held(self) -> float:
        """Some tensor of float16 holds a number of at least this size; NaN or infinite where a gradient is."""
        sizes = [self._logits]
        for name, summed in self._before.items():
            whole = _size(summed)
            sizes.append(whole if self._travels_narrow or not math.isfinite(whole) else self._held_of_parts(name))
        return float(torch.tensor(sizes, dtype=torch.float64).max())

    @property
    def bound(self) -> float:
        """No tensor of float16 holds a larger number."""
        cut = {name: _OF_A_PART if self._is_cut(name) else 1.0 for name in self._sums}
        parameters = max(size * cut[name] for name, size in self._sums.items())
        return max(self._logits, self._outputs * _BETWEEN_OUTPUTS, parameters)

    @property
    def _travels_narrow(self) -> bool:
        return bool(self.case.grad_dtype == "model")

    def _held_of_parts(self, name: str) -> float:
        """The least size of the largest part, where a micro-batch's gradient is all that float16 holds.

        A fused or deferred product is in float32 from the start. Ranks of experts mix the tokens of data ranks.
        """
        case = self.case
        if case.wgrad != "plain" or case.experts:
            return 0.0
        ranks = case.world_size // case.dp  # each has at most two parts of a tied table, and one of another parameter
        return self._parts[name] / (2 * ranks if self._is_cut(name) else 1)

    def _is_cut(self, name: str) -> bool:
        """Whether ranks hold parts of this gradient that add up to a micro-batch's.

        Context ranks and isp hold all gradients by parts of the tokens, sequence parallelism those of vectors. Vectors
        of queries and keys are held by parts of the heads, and a tied table by its two readers.
        """
        case, mode = self.case, MODES[self.case.mode]
        vector = self._before[name].dim() == 1 and (mode.sequence or ".q_norm" in name or ".k_norm" in name)
        table = case.tied and name.startswith("embedding")
        return table or vector or case.cp > 1 or mode.gathers_weights


def _size(gradient: Tensor) -> float:
    return float(gradient.abs().max())


def _larger(size: float, gradient: Tensor) -> float:
    return float(torch.tensor([size, _size(gradient)], dtype=torch.float64).max())
