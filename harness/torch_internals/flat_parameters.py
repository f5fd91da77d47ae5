"""Parameters of FSDP1, which lie flattened in one tensor a module: which part of which of them a rank holds.

Source: torch.distributed.fsdp._flat_param (FlatParameter's `_fqns`, `_shapes`, `_params`, `_shard_param_infos`).
"""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

_MODULE = "torch.distributed.fsdp._flat_param"


class Piece(NamedTuple):
    """A parameter that was flattened: its name below the FSDP1 module, its shape, and the part that this rank holds.

    `start` and `length` count elements of the flattened parameter; `offset` is the part's place in the rank's shard.
    `view` is the parameter of that name, None if only the flat one is registered.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int
    view: Any


def flat_parameter(module: nn.Module) -> tuple[Tensor, tuple[Piece, ...]] | None:
    """The flat parameter of a module that FSDP1 wraps, with its pieces; None for other modules.

    Uses FullyShardedDataParallel._handle.flat_param; if that is missing, nothing is known of such parameters.
    """
    handle = getattr(module, "_handle", None) if _MODULE in sys.modules else None
    flat = getattr(handle, "flat_param", None)
    if not isinstance(flat, Tensor) or not hasattr(flat, "_shard_param_infos"):
        return None
    return flat, tuple(_pieces(flat))


def _pieces(flat: Any) -> Iterator[Piece]:
    views = flat._params or (None,) * len(flat._fqns)
    for name, shape, info, view in zip(flat._fqns, flat._shapes, flat._shard_param_infos, views, strict=True):
        start, length, offset = info.intra_param_start_idx, info.numel_in_shard, info.offset_in_shard
        yield Piece(name, tuple(shape), start or 0, length or 0, offset or 0, view)  # all None outside of the shard
