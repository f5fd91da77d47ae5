"""Shapes that DTensor infers, for all ranks and runs of a process once.

DTensor infers the shape of what an operator returns by calling it on fake tensors, and keeps the answer for the thread
that asked. Ranks that are threads start every run with no answers. They would ask again what depends on no rank, mesh
or placement. Measured: 6 of 21 seconds of the proof of a decoder with fully_shard on top of parallelize_module.

Source: torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardproof.harness.torch_internals.lookup import replace_attribute

_MODULE = "torch.distributed.tensor._sharding_prop"
_INFER = "_propagate_tensor_meta_non_cached"
_BUILT_IN = frozenset(("aten", "prim", "prims"))
"""Namespaces of operators that no program defines anew."""
_MOST = 8192
_known: dict[object, object] = {}


@contextmanager
def share_inferred_shapes() -> Iterator[None]:
    """Within it what DTensor has inferred for one thread is known to all; nothing changes where torch lacks it."""
    propagator: Any = getattr(sys.modules.get(_MODULE), "ShardingPropagator", None)
    infer = getattr(propagator, _INFER, None)
    if infer is None:
        yield
        return

    def infer_once(self: Any, schema: Any) -> Any:
        try:
            asked = _question(schema)
            hash(asked)
        except (AttributeError, TypeError):  # symbolic sizes, or a schema of another torch
            asked = None
        if asked is None:
            return infer(self, schema)
        if asked not in _known:
            answer = infer(self, schema)
            if isinstance(answer, list):  # the caller's to change
                return answer
            if len(_known) >= _MOST:
                _known.clear()
            _known[asked] = answer
        return _known[asked]

    with replace_attribute(propagator, _INFER, infer_once):
        yield


def _question(schema: Any) -> object:
    """All that shapes, strides and dtypes of the results depend on; None for an operator that a program may define.

    FakeTensorMode's own cache, which serves a whole process too, compares the same.
    """
    if schema.op.namespace not in _BUILT_IN or torch.compiler.is_compiling():
        return None
    autocast = tuple(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in _DEVICES)
    setting = (torch.get_default_dtype(), torch.is_inference_mode_enabled(), autocast)
    words = tuple((word, _stripped(value)) for word, value in schema.kwargs_schema.items())
    return schema.op, setting, _stripped(schema.args_schema), words


_DEVICES = ("cpu", "cuda")


def _stripped(value: Any) -> object:
    """The value with its type, for 1 and 1.0 and True are equal; of a DTensor its global shape, stride and dtype."""
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_stripped, value))
    if (described := getattr(value, "tensor_meta", None)) is not None:
        return type(described), described
    return type(value), value
