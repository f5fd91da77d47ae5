"""What operators make of tensors that have shapes and no numbers, asked of torch once for tensors laid out alike.

torch finds it in Python: a millisecond for a sum of two tensors, of which a step has thousands. It follows from the
layouts and values that an operator is given, and from the default dtype.

Of meta tensors, results of operators of aten are known that write to nothing and return new memory, filled without
holes. DTensor asks what an operator returns before it splits it, and keeps the answer for one thread and one mesh. Both
are new in every run of the in-process engine: here the answer, which names neither, is kept for the process.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.harness.torch_internals.autograd import storage_id
from shardproof.harness.torch_internals.dispatch import makes_new, written_arguments

_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_MOST = 20_000
"""Results that are kept: some megabytes."""
_VALUES = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_known: dict[tuple[Any, ...], tuple[bool, tuple[_Layout, ...]]] = {}
"""Operator and what it was given -> whether it returns one tensor alone, and how its tensors are laid out."""


def make_result(operator: Any, args: Sequence[Any], words: Mapping[str, Any]) -> Any:
    """The result of an operator, which it may have had before."""
    if not _is_function(operator):
        return operator(*args, **words)
    try:
        key = operator, torch.get_default_dtype(), _key_of(args), _key_of([*words.items()])
    except (TypeError, AttributeError):  # something else than shapes and numbers
        return operator(*args, **words)
    if (known := _known.get(key)) is None:
        result = operator(*args, **words)
        if (layouts := _layouts_of(result)) is not None and len(_known) < _MOST:
            _known[key] = isinstance(result, Tensor), layouts
        return result
    alone, layouts = known
    made = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for shape, stride, dtype in layouts]
    return made[0] if alone else tuple(made)


@functools.cache
def _is_function(operator: Any) -> bool:
    return operator.namespace == "aten" and makes_new(operator) and not written_arguments(operator)


def _key_of(given: Sequence[Any]) -> tuple[Any, ...]:
    """What a result depends on. Raises TypeError for what is neither a meta tensor nor a value nor a list of these."""
    return tuple(_key_of_one(one) for one in given)


def _key_of_one(one: Any) -> Any:
    kind = type(one)
    if kind in _VALUES:
        return kind, one
    if kind is list or kind is tuple:
        return _key_of(one)
    if kind is Tensor or kind is nn.Parameter:
        if not one.is_meta or one.layout is not torch.strided or one.is_conj() or one.is_neg():
            raise TypeError
        return one.shape, one.stride(), one.dtype
    return (*one.tensor_meta, one.mesh.device_type)  # DTensor's spec; an AttributeError is handled as a TypeError


def _layouts_of(result: Any) -> tuple[_Layout, ...] | None:
    """How the tensors of a result are laid out; None unless each has memory of its own, and no more than it needs."""
    tensors = (result,) if isinstance(result, Tensor) else result
    if not isinstance(tensors, tuple) or not all(type(one) is Tensor and one.is_meta for one in tensors):
        return None
    if len({storage_id(one) for one in tensors}) < len(tensors):
        return None
    layouts = tuple((one.shape, one.stride(), one.dtype) for one in tensors)
    for one, (shape, stride, dtype) in zip(tensors, layouts, strict=True):
        alike = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if one.storage_offset() or one.untyped_storage().nbytes() != alike.untyped_storage().nbytes():
            return None
    return layouts


_PROPAGATION = "torch.distributed.tensor._sharding_prop"
_ASKED = "_propagate_tensor_meta_non_cached"
_stated: dict[tuple[Any, ...], Any] = {}
"""Operator and what it was given -> the shape, strides and dtype of what it returns."""


def share_stated_shapes() -> None:
    """Have DTensor, where it is loaded, ask once in a process what an operator returns for tensors laid out alike.

    Uses torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached and the op and
    schemas of its argument; where they are missing, or sizes are symbols, nothing is kept.
    """
    owner: Any = getattr(sys.modules.get(_PROPAGATION), "ShardingPropagator", None)
    ask: Any = getattr(owner, _ASKED, None)
    if ask is None or hasattr(ask, "__wrapped__"):
        return

    @functools.wraps(ask)
    def ask_once(propagator: Any, schema: Any) -> Any:
        try:
            given = _key_of(schema.args_schema), _key_of([*schema.kwargs_schema.items()])
            key = schema.op, torch.get_default_dtype(), *given
            known = _stated.get(key, _stated)
        except (TypeError, AttributeError):
            return ask(propagator, schema)
        if known is _stated:
            known = ask(propagator, schema)
            if len(_stated) < _MOST:
                _stated[key] = known
        return list(known) if isinstance(known, list) else known

    setattr(owner, _ASKED, ask_once)
