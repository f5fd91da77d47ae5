"""Likely causes of a flaw that comes before any number: the kind of numbers that a tensor holds, and its full shape.

Found from the dtypes and shapes of the blocks beside those of the truth; other flaws of a layout get no cause here.
"""

from collections.abc import Mapping, Sequence

import torch

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.diagnosing.causes.cause import Cause, reported
from shardproof.harness.diagnosing.causes.places import blocks_of
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.outcome.blocks import Block

_Shape = tuple[int, ...]


def from_flaws(evidence: Evidence, wrong: Sequence[str]) -> list[Cause]:
    """The cause for the first wrong name whose blocks have another dtype or shape than they should."""
    kinds = {flaw.name: flaw.kind for flaw in evidence.merged.flaws}
    for name in wrong:
        blocks = [block for of_rank in blocks_of(evidence, name).values() for block in of_rank]
        if name in kinds and name in evidence.truth and blocks:
            if kinds[name] == "dtype":
                return [_of_dtype({block.local.dtype for block in blocks})]
            if kinds[name] == "shape":
                true = tuple(evidence.truth[name].shape)
                return [_of_shape(blocks, true, split_axes(evidence.case))]
    return []


def _of_dtype(dtypes: set[torch.dtype]) -> Cause:
    if len(dtypes) > 1:
        words = "ranks hold it in different dtypes"
    elif any(dtype.is_complex for dtype in dtypes):
        words = "complex numbers where real ones belong"
    elif torch.bool in dtypes:
        words = "truth values where numbers belong"
    else:
        words = "whole numbers where fractions belong"
    return reported("other_dtype", words, dtypes)


def _of_shape(blocks: Sequence[Block], true: _Shape, axes: Mapping[str, int]) -> Cause:
    shapes = dict.fromkeys(block.global_shape for block in blocks)
    mine = next(shape for shape in shapes if shape != true)
    for axis, size in axes.items():
        for dim in range(len(true)):
            if mine == (*true[:dim], true[dim] // size, *true[dim + 1 :]):
                words = f"1 of {size} parts along dim {dim} ({axis}) told as the whole: return Shard(local, offsets, "
                return reported("part_as_whole", words + f"{true}) where a rank holds a part", mine)
    if len(shapes) > 1:
        words = "ranks state different global shapes: it is the dense model's on every rank"
    elif sorted(mine) == sorted(true):
        words = "its dims in another order"
    elif len(mine) != len(true):
        words = "a dim too many or too few"
    elif all(one >= other for one, other in zip(mine, true, strict=True)):
        words = "rows or columns too many"
    else:
        words = "rows or columns that are missing"
    return reported("other_shape", words, mine)
