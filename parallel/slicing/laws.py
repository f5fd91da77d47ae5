"""The whole tensor from the parts of all ranks; copies must be equal bit for bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.communication.layout import Placement, gather, meshgrid, pieces
from parallel.slicing.errors import SliceError
from parallel.slicing.held import times_held


def inverse(parts: Sequence[Tensor], place: Placement) -> Tensor:
    """The whole tensor from the parts of all ranks, in their order.

    Raises SliceError when parts that hold the same elements differ, or some elements lie on no rank.
    """
    for cut in place.cuts:
        lost = times_held(cut.held, place.shape[cut.dim or 0]).count(0)
        if lost:
            raise SliceError("held", f"{lost} elements", "lie on no rank", "parts that hold every element")
    ranks = meshgrid({"tp": len(parts)})
    whole = gather(zip(ranks, parts, strict=True), place)
    for rank, part in enumerate(parts):
        for piece in pieces(part, place, ranks[rank]):
            box = tuple(slice(at, at + n) for at, n in zip(piece.offsets, piece.local.shape, strict=True))
            if not same_bits(whole[box], piece.local):
                raise SliceError("parts", f"rank {rank}", "differs from another rank's copy", "equal copies")
    return whole


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits, NaN and the sign of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))
