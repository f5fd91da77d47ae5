"""Random errors of the size of rounding in what operators return: Monte Carlo arithmetic.

A result is multiplied by 1 + epsilon * u with u uniform between -1/2 and 1/2. So a computation in a wide dtype carries
the errors that a narrower one would give it, whatever dtypes its code names. A computation in its own dtype shows how
far it amplifies rounding of any kind.

A contraction (a product of matrices, a sum) rounds not only its result. Kernels add up its n terms in the narrow
dtype, or in float32 where that is wider. So its terms are moved too. The k-th of n independent terms, added one after
the other, is rounded with a sum of k. All roundings come to sqrt((n + 1) / 2) of the last one, and terms are moved as
far (Higham and Mary 2019, doi:10.1137/18M1226312). Sums of rows take this order in the narrow dtype itself
(harness.checking.measuring has the kernels that do).

Operators that choose, copy or arrange numbers are exact. So are those that make numbers of none (constants, draws),
whole numbers, and results that share memory with an argument.

Sources: Parker 1997, "Monte Carlo Arithmetic"; Verificarlo (arXiv:1509.01347) for the field's own tool.
"""

import functools
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.checking.measuring import ROUNDING
from shardproof.harness.torch_internals.autograd import numbers_of, storage_id
from shardproof.harness.torch_internals.dispatch import (
    DispatchMode,
    FakeTensor,
    leaves,
    makes_new,
    map_leaves,
    take_themselves_apart,
    written_arguments,
)

PRODUCTS = frozenset(
    "addbmm addmm addmv addr baddbmm bmm convolution convolution_backward dot linear matmul mm mv vdot _grouped_mm "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention".split()
)
"""Operators of aten that multiply matrices."""
_SUMS = frozenset("cumsum linalg_vector_norm logcumsumexp logsumexp mean prod std sum var".split())
"""Operators of aten that add up, or multiply, the numbers of their first argument."""
_ROW_SUMS = frozenset(
    "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward _fused_rms_norm_backward "
    "embedding_dense_backward".split()
)
"""Operators of aten whose only result, or each but the first, is a sum over the rows of their first argument."""
_EXACT = frozenset(
    "abs amax amin bernoulli cat clamp clamp_max clamp_min clone constant_pad_nd copy cummax cummin diag_embed "
    "diagonal_scatter dropout embedding fill flip floor ceil round trunc gather index index_fill index_put "
    "index_select isin kthvalue lift_fresh_copy masked_fill masked_scatter masked_select max max_pool2d_with_indices "
    "maximum median "
    "min minimum mode nan_to_num narrow_copy neg relu repeat repeat_interleave roll rot90 scatter select_backward "
    "select_scatter sgn sign slice_backward slice_scatter sort stack take topk tril triu unbind_copy unfold_backward "
    "where zeros_like _unsafe_index threshold_backward _foreach_neg _foreach_abs _foreach_clone".split()
)
"""Operators of aten whose results are numbers that they were given, or 0, or these with another sign."""
_COPIES = frozenset(("_to_copy", "to", "_foreach_copy"))
"""Operators that round where the dtype of the result is narrower, and are exact where it is not."""


_WIDE = torch.finfo(torch.float32).eps
"""The epsilon of the narrowest accumulator of a kernel."""


_SHARE = ROUNDING * math.sqrt(12)
"""The error of one rounding, in units of the error of a number that is moved uniformly by up to half an epsilon."""


class RandomRounding(DispatchMode):
    """Moves what operators of its thread return by a random part of rounding; `products`: the epsilons of the dtypes in
    which matrices were multiplied.

    `units`: dtype -> the epsilon by which results in it are moved; those in other dtypes stay. With `inputs`, numbers
    that follow from constants and draws alone are moved too: initial values, samples, tables. With `leaving`, numbers
    of these dtypes are moved once more where they enter wider arithmetic: in their own dtype they move by whole units
    alone. Another `seed` is another run; ranks with one seed move equal results by equal amounts.
    """

    def __init__(
        self, units: Mapping[torch.dtype, float], *, seed: int = 0, inputs: bool = True, leaving: bool = False
    ) -> None:
        super().__init__()
        self.products: set[float] = set()
        self._units = units
        self._leaving = leaving
        self._inputs = inputs
        self._computed: dict[int, Any] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operator's result, off by rounding."""
        kwargs = kwargs or {}
        if take_themselves_apart(types):
            return NotImplemented
        if any(issubclass(kind, FakeTensor) for kind in types):
            return operator(*args, **kwargs)
        if operator.namespace == "_c10d_functional":  # it returns before its result is there, which is waited for later
            return self.compute(operator, args, kwargs)
        name, new, exact = _kind_of(operator)
        if not self._units or not (self._inputs or name in PRODUCTS or self._computes(args, kwargs)):
            return self._note_product(name, self.compute(operator, args, kwargs))
        if name in PRODUCTS or name in _SUMS:
            args = self._terms_moved(name, args)
        if self._leaving:
            args = self._move_arguments(operator, args, kwargs)
        result = self._note_product(name, self.compute(operator, args, kwargs))
        self._remember(result)
        if self._leaving and not exact and operator.namespace == "aten":
            self._move_written(operator, args)
        if not new or exact or not _takes_numbers(args):
            return result
        if name in _COPIES and _epsilon(result) <= _epsilon(args[0]):
            return result
        if name in _ROW_SUMS:
            rows = functools.partial(self._move_randomly, terms=math.prod(args[0].shape[:-1]), narrow=True)
            first, *rest = result if isinstance(result, tuple) else (None, result)
            moved = (self._move_randomly(first), *map(rows, rest))
            self._remember(moved)
            return moved if isinstance(result, tuple) else moved[1]
        moved = map_leaves(self._move_randomly, result)
        self._remember(moved)
        return moved

    def _move_written(self, operator: Any, args: Sequence[Any]) -> None:
        """Move what an operator has computed in place: sums of gradients, steps of parameters."""
        for place in written_arguments(operator):
            for x in leaves(args[place]) if place < len(args) else ():
                if isinstance(x, Tensor) and x.dtype in self._units:
                    x.copy_(self._move_randomly(x))

    def _computes(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether an operator is given a parameter, or what follows from parameters or products of matrices."""
        real = (x for x in leaves((args, kwargs)) if _is_real(x))
        return any((x.requires_grad and x.is_leaf) or storage_id(x) in self._computed for x in real)

    def _remember(self, result: Any) -> None:
        """Remember the memory of what is computed for as long as it lives."""
        for x in () if self._inputs else leaves(result):
            if _is_real(x) and storage_id(x) not in self._computed:
                key = storage_id(x)
                gone = functools.partial(self._computed.pop, key)
                self._computed[key] = weakref.ref(numbers_of(x).untyped_storage(), gone)

    def _note_product(self, name: str, result: Any) -> Any:
        """The result; the dtype of a product is remembered."""
        if name in PRODUCTS:
            self.products |= {_eps(x.dtype) for x in leaves(result) if _is_real(x)}
        return result

    def compute(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of the operator, before it is moved."""
        return operator(*args, **kwargs)

    def _terms_moved(self, name: str, args: Sequence[Any]) -> list[Any]:
        """The arguments of a contraction, one factor of its products moved by what the sum rounds."""
        terms, narrow = _terms(name, args), name == "sum" and _of_rows(args)
        places = [place for place, x in enumerate(args) if isinstance(x, Tensor)]
        one = places[-2] if len(places) > 1 and name in PRODUCTS else places[0]
        return [
            map_leaves(functools.partial(self._move_randomly, terms=terms if place == one else 1, narrow=narrow), x)
            for place, x in enumerate(args)
        ]

    def _move_randomly(self, x: Any, terms: int = 0, *, narrow: bool = False) -> Any:
        """A tensor moved by its dtype's unit, or by the rounding of a sum of `terms` of it; anything else as it is.

        A number that was kept in the narrow dtype was rounded when it was made: only the rounding of the sum is added.
        """
        if not _is_real(x) or x.dtype not in self._units:
            return x
        unit = self._units[x.dtype]
        summed = (unit if narrow else min(unit, _WIDE)) * _SHARE * math.sqrt((terms + 1) / 2) if terms else 0.0
        kept = bool(terms) and unit >= _eps(x.dtype)
        return self._by(x, summed if kept else max(unit, summed))

    def _by(self, x: Tensor, unit: float) -> Tensor:
        if x.is_complex():
            return torch.view_as_complex(self._by(torch.view_as_real(x.resolve_conj()), unit))
        if numbers_of(x) is not x:
            moved = x.clone()
            numbers_of(moved).copy_(self._by(numbers_of(x), unit))
            return moved
        wide = torch.promote_types(x.dtype, torch.float32)  # errors are added, so a float32 rounds once, at the end
        part = torch.empty(x.shape, dtype=wide).uniform_(-unit / 2, unit / 2, generator=self._generator).to(x.device)
        moved = torch.addcmul(x.to(wide), x, part).to(x.dtype)
        return moved.where(x != x.round(), x)  # whole numbers and infinities stay

    def _move_arguments(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The arguments; those in dtypes of `units` are converted to the wider dtype of the result, and moved there."""
        given = any(isinstance(x, Tensor) and x.dtype in self._units for x in leaves(args))
        if not given:
            return args
        wanted = kwargs.get("dtype") or _promote_dtypes(args)
        if not (wanted.is_floating_point or wanted.is_complex):
            return args

        def widen_tensor(x: Any) -> Any:
            if not _is_real(x) or x.dtype not in self._units or _eps(wanted) >= _eps(x.dtype):
                return x
            return self._by(x.to(wanted), self._units[x.dtype])

        written = written_arguments(operator)
        return [x if place in written else map_leaves(widen_tensor, x) for place, x in enumerate(args)]


def _terms(name: str, args: Sequence[Any]) -> int:
    """How many terms a contraction adds up for each number that it returns."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    if name in _SUMS:
        whole, dims = tensors[0], next((x for x in args[1:] if isinstance(x, list | tuple) and x), None)
        return whole.numel() if dims is None else math.prod(whole.shape[dim] for dim in dims)
    if name in ("convolution", "convolution_backward"):
        return math.prod(tensors[-1].shape[1:])
    return tensors[-2].shape[-1] if len(tensors) > 1 and tensors[-2].dim() else 1


def _of_rows(args: Sequence[Any]) -> bool:
    """Whether a sum leaves the last dim of what it adds up: rows are added to each other."""
    dims = next((x for x in args[1:] if isinstance(x, list | tuple)), ())
    return bool(dims) and all(dim % args[0].dim() < args[0].dim() - 1 for dim in dims)


def _promote_dtypes(args: Sequence[Any]) -> torch.dtype:
    """The dtype to which tensors are promoted together; those without a dim count where there are no others."""
    real = [x for x in leaves(args) if _is_real(x)]
    dtypes = [x.dtype for x in real if x.dim()] or [x.dtype for x in real]
    widest: torch.dtype = functools.reduce(torch.promote_types, dtypes)
    return widest


@functools.cache
def _kind_of(operator: Any) -> tuple[str, bool, bool]:
    """An operator's name, whether it returns new memory, and whether what it returns is exact."""
    name: str = operator.overloadpacket.__name__
    drawn = torch.Tag.nondeterministic_seeded in operator.tags and "scaled_dot_product" not in name
    exact = name.removesuffix("_") in _EXACT | {"zero", "set", "resize", "detach", "requires_grad"}
    return name, makes_new(operator), exact or drawn


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and not x.is_mkldnn


def _takes_numbers(args: Sequence[Any]) -> bool:
    """Whether an operator is given a tensor of real numbers: without one it makes constants."""
    return any(_is_real(x) for x in leaves(args))


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _epsilon(x: Any) -> float:
    """The epsilon of the first tensor of real numbers in here."""
    return next((_eps(leaf.dtype) for leaf in leaves(x) if _is_real(leaf)), 0.0)
