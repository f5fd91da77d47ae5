"""Many tensors in one collective: the shards of several parameters, each split along dim 0, end to end in one buffer.

With w ranks and n elements a rank, the buffer of a gather is [w, n] and row r holds every shard of rank r. A reduction
sends the same buffer the other way. Bytes are those of one call a tensor. Source: modes.md 3.6 (`layer_fuse_isp_comm`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.communication.collectives import reduce_scatter, start_all_gather
from parallel.communication.mesh import Axis


class FlatGather:
    """An all-gather of many shards, started when this is made; `tensors` may be called any number of times."""

    def __init__(self, shards: Sequence[Tensor], axis: Axis, *, overlap: bool) -> None:
        self._shapes = [shard.shape for shard in shards]
        self._ranks = axis.size
        flat = torch.cat([shard.detach().flatten() for shard in shards])
        self._pending = start_all_gather(flat, axis, dim=0, overlap=overlap)
        self._rows: tuple[Tensor, ...] | None = None

    def tensors(self, first: int, count: int) -> list[Tensor]:
        """`count` full tensors from number `first` on, as copies, so that none of them keeps the buffer alive."""
        if self._rows is None:
            buffer = self._pending.wait().view(self._ranks, -1)
            self._rows = buffer.split([shape.numel() for shape in self._shapes], 1)
        chosen = zip(self._rows[first : first + count], self._shapes[first : first + count], strict=True)
        return [part.clone().view(self._ranks * shape[0], *shape[1:]) for part, shape in chosen]


def reduce_scatter_flat(fulls: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """This rank's shard along dim 0 of the sum over the axis of every tensor, in one reduce-scatter."""
    buffer = torch.cat([full.reshape(axis.size, -1) for full in fulls], 1)
    own = reduce_scatter(buffer.flatten(), axis, dim=0)
    parts = own.split([full.numel() // axis.size for full in fulls])
    return [part.view(full.shape[0] // axis.size, *full.shape[1:]) for part, full in zip(parts, fulls, strict=True)]
