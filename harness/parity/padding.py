"""Batches that are padded to their longest row: what one rank reads is wider in one launch than in the other.

A padded row ends, or begins, in one value of its tensor. Where the rows of both launches are the same without it, they
are all brought to one width.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

Tensors = Mapping[tuple[int, int], Mapping[str, Tensor]]
"""(rank, micro-batch) -> what the outermost module received, by its place there."""
_MOST = 64
"""Values that are tried as the padding of a tensor."""


def without_padding(mine: Tensors, theirs: Tensors) -> tuple[Tensors, Tensors] | None:
    """Both launches' tensors at one width, those alone that can be; None where widths agree, or padding is none."""
    names = {name for given in mine.values() for name in given} & {name for given in theirs.values() for name in given}
    aligned: dict[str, dict[int, Tensor]] = {}
    told = False
    for name in sorted(names):
        tensors = [given[name] for launch in (mine, theirs) for given in launch.values() if name in given]
        if any(one.dim() != 2 for one in tensors):
            continue
        if len({one.shape[1] for one in tensors}) == 1:
            aligned[name] = {id(one): one for one in tensors}
            continue
        for value, last in _paddings(tensors):
            own, other = (
                {_strip(row, value, last) for given in launch.values() if name in given for row in given[name].tolist()}
                for launch in (mine, theirs)
            )
            if own == other:
                width = max(one.shape[1] for one in tensors)
                aligned[name] = {id(one): _widen(one, width, value, last) for one in tensors}
                told = told or () not in own
                break
    if not told:
        return None
    first, second = (
        {
            key: {name: aligned[name][id(one)] for name, one in given.items() if name in aligned}
            for key, given in of.items()
        }
        for of in (mine, theirs)
    )
    return first, second


def _paddings(tensors: list[Tensor]) -> Iterator[tuple[float, bool]]:
    """Values in which rows end, then those in which they begin."""
    for last in (True, False):
        values = torch.cat([one[:, -1 if last else 0] for one in tensors]).unique()
        yield from ((value, last) for value in values[:_MOST].tolist())


def _strip(row: list[float], value: float, last: bool) -> tuple[float, ...]:
    """A row without the padding at its end, or at its beginning."""
    step = -1 if last else 1
    kept = row[::step]
    while kept and kept[0] == value:
        kept = kept[1:]
    return tuple(kept[::step])


def _widen(tensor: Tensor, width: int, value: float, last: bool) -> Tensor:
    more = tensor.new_full((tensor.shape[0], width - tensor.shape[1]), value)
    return torch.cat([tensor, more] if last else [more, tensor], 1)
