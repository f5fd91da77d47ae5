"""The same computation with every contraction cut into partial sums: how far rounding alone may carry a right result.

A control run for any dense model cuts every matrix product of a thread in this context, forward and backward. The
product is the sum of products over slices of the contracted dimension, last slice first, each rounded to the dtype of
the run. Sums over a dimension are cut likewise. With an even number of slices attention is made of matrix products, not
torch's fused kernel.

A sum of rows, such as the gradient of a bias, adds the rows of a slice one after the other. torch's kernel of a layer
norm does so too, and no order rounds more (harness.checking.measuring). The sum is in float32 at least, or in the
dtype itself where the number of slices is odd.

A truth may compute more exactly than its case does: in float64, whatever the case says. Its sums round nothing then.
So all that it computes in a wider dtype is moved by a random part of the case's rounding (`random_rounding`). Its
control runs are then as far from the truth as those of the same function written in the case's dtype.

With parts of PERTURBED nothing is cut: the result of every operator is off by a random part of its own rounding.
The outcome shows how far a model amplifies rounding of any kind.

CONTROL_FACTOR times the effect in a few control runs bounds results that depend smoothly on numbers. It does not bound
choices: which of two logits is larger, or the sign of a gradient of which Adam makes a whole step. A right program may
choose otherwise where no control run does. So AMPLIFIED runs move results by CONTROL_FACTOR times as much, and often
change the choices that such an error can change.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardproof.harness.checking.measures.measured import epsilon
from shardproof.harness.checking.measures.tolerance import CONTROL_FACTOR
from shardproof.harness.running.truth.random_rounding import RandomRounding

PERTURBED = (-1, -8, -9, -10)
"""Values of `parts` that cut nothing, and move every result by a random part of its own dtype's rounding.

There are several, since a tensor may be a single number: 8 % of normal errors are below a tenth of their standard
deviation. Four such draws in a row have a probability of 4e-5.
"""
AMPLIFIED = (-2, -3, -4, -5, -6, -7)
"""Values of `parts` that move results CONTROL_FACTOR times as far, for results in which choices depend on rounding."""

aten = torch.ops.aten


class _AttentionKernels:
    """torch's choice of attention kernels is that of the process: the first rank to need others sets it, and the last
    one restores it. If each rank restored what it found, it would leave what other ranks had set.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._choice = threading.Lock(), 0, ExitStack()

    @contextmanager
    def choose(self, kernels: list[SDPBackend]) -> Iterator[None]:
        """Inside, attention takes one of these kernels."""
        with self._lock:
            if not self._inside:
                self._choice.enter_context(sdpa_kernel(kernels))
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._choice.close()


_KERNELS = _AttentionKernels()


@contextmanager
def partial_sums(
    parts: int, units: Mapping[torch.dtype, float] | None = None, *, inputs: bool = True
) -> Iterator[RandomRounding]:
    """Inside, contractions of this thread are sums of `parts` partial sums; 1 cuts nothing.

    `units` and `inputs` say how results are moved as well (RandomRounding). With an odd number attention stays fused,
    since the fused backward takes yet other sums.
    """
    kernels = [SDPBackend.MATH] if parts % 2 == 0 else list(SDPBackend.__members__.values())[1:]
    mode: RandomRounding = _Cut(parts, units or {}, inputs)
    if parts < 0:
        factor = CONTROL_FACTOR if parts in AMPLIFIED else 1.0
        moves = {kind: factor * unit for kind, unit in {**_OWN, **(units or {})}.items()}
        mode = RandomRounding(moves, seed=-parts, inputs=inputs or parts in PERTURBED)
    with _KERNELS.choose(kernels), mode:
        yield mode


def emulated_dtypes(dtype: str, *, wide: bool) -> dict[torch.dtype, float]:
    """The dtypes in which a truth computes more exactly than a case of this dtype does -> the epsilon of the case.

    float64 is such a dtype for every narrower case. A truth that follows a 16-bit case has float32 where programs have
    it: in norms, losses, optimizers. So float32 is one only for a truth that multiplies nothing in 16 bits (`wide`).
    """
    unit = epsilon(dtype)
    finer = {kind: own for kind, own in _OWN.items() if own < unit}
    finest = min(finer.values(), default=0.0)
    return {kind: unit for kind, own in finer.items() if wide or own == finest}


_OWN: Mapping[torch.dtype, float] = {
    kind: torch.finfo(kind).eps
    for kind in (torch.float64, torch.complex128, torch.float32, torch.complex64, torch.bfloat16, torch.float16)
}


class _Cut(RandomRounding):
    """Cuts each operator of _CUT as it is issued."""

    def __init__(self, parts: int, units: Mapping[torch.dtype, float], inputs: bool) -> None:
        super().__init__(units, seed=parts, inputs=inputs)
        self._parts = parts

    def compute(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator's result, by partial sums where it contracts."""
        cut = _CUT.get(operator)
        dense = all(x.layout is torch.strided for x in args if isinstance(x, Tensor))
        if cut is None or kwargs or self._parts == 1 or not (dense and args[0].is_floating_point()):
            return operator(*args, **kwargs)
        return cut(self._parts, *args)


def _mm(parts: int, left: Tensor, right: Tensor) -> Tensor:
    """left [..., I, K] times right [..., K, J] by slices of K."""
    pairs = zip(left.tensor_split(parts, -1), right.tensor_split(parts, -2), strict=True)
    return _add_reversed([torch.matmul(a, b) for a, b in pairs if a.shape[-1]], lambda: torch.matmul(left, right))


def _addmm(parts: int, bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return _mm(parts, left, right) + bias


def _mv(parts: int, left: Tensor, right: Tensor) -> Tensor:
    return _mm(parts, left, right.unsqueeze(-1)).squeeze(-1)


def _dot(parts: int, left: Tensor, right: Tensor) -> Tensor:
    return _mv(parts, left.unsqueeze(0), right).squeeze(0)


def _addmv(parts: int, bias: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return _mv(parts, left, right) + bias


def _sum(parts: int, tensor: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Tensor:
    """The sum over these dimensions (all, when there are none) by slices of the longest, each summed in turn."""
    over = [dim % tensor.dim() for dim in dims] if dims else list(range(tensor.dim()))
    if not over:
        return tensor.clone()
    longest = max(over, key=lambda dim: tensor.shape[dim])
    slices = [part for part in tensor.tensor_split(parts, longest) if part.shape[longest]]
    if max(over) < tensor.dim() - 1:
        wide = tensor.dtype if parts % 2 else torch.promote_types(tensor.dtype, torch.float32)
        return _add_reversed(
            [_in_turn(part, over, keepdim, wide) for part in slices], lambda: tensor.sum(over, keepdim)
        )
    return _add_reversed([part.sum(over, keepdim) for part in slices], lambda: tensor.sum(over, keepdim))


def _in_turn(rows: Tensor, over: Sequence[int], keepdim: bool, wide: torch.dtype) -> Tensor:
    """The sum over dimensions before the last one, the rows added one after the other in this dtype."""
    first = rows.movedim(list(over), list(range(len(over)))).flatten(0, len(over) - 1)
    index = torch.zeros(len(first), dtype=torch.int64, device=rows.device)
    total = first.new_zeros(1, *first.shape[1:], dtype=wide).index_add_(0, index, first.to(wide))[0].to(rows.dtype)
    return total.reshape([1 if dim in over else size for dim, size in enumerate(rows.shape)]) if keepdim else total


def _whole(parts: int, tensor: Tensor) -> Tensor:
    return _sum(parts, tensor, None) if tensor.dim() else tensor.clone()


def _add_reversed(terms: Sequence[Tensor], empty: Callable[[], Tensor]) -> Tensor:
    """The terms added last first; what `empty` gives when there are none."""
    if not terms:
        return empty()
    total = terms[-1]
    for term in reversed(terms[:-1]):
        total = total + term
    return total


_CUT: Mapping[Any, Callable[..., Tensor]] = {
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten.mv.default: _mv,
    aten.addmv.default: _addmv,
    aten.dot.default: _dot,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _whole,
}
