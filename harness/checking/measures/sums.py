"""Errors that rounding makes of sums over tokens."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ROUNDING = math.sqrt(3 / (8 * math.log(2)) / 12)
"""The root mean square error of one rounding, in epsilons of its result."""
_WIDE = torch.finfo(torch.float32).eps
"""Epsilon of the narrowest accumulator of a matrix product."""
OVER_TOKENS: Mapping[str, float] = {"grad": 1.0, "exp_avg_after": 1.0, "exp_avg_sq_after": 2.0}
"""Kinds of names whose elements are sums over tokens -> their relative error in units of the sum's: a square has twice
as much."""


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
    counted += [_rows(truth["logits/0"])] if "logits/0" in truth else []
    if not counted:
        counted = [micro * _rows(x) for name, x in truth.items() if name.startswith("act/") and x.dim() in (2, 3)]
    return max(counted, default=1)


def _rows(x_TE: Tensor) -> int:
    return math.prod(x_TE.shape[:-1])
