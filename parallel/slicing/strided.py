"""DeepSpeed's two copies, as placements computed from shapes alone, and where the scales of a quantised weight go.

    strided    several sub-parameters one behind the other (q, k, v; gate, up): each is cut by itself, and a rank holds
               its piece of each (`strided_copy`; `num_splits` equal parts, or parts of any lengths)
    plain      one contiguous part of the output features, or of the input features (`copy`)

Weights are [in, out] after a policy's transpose, or [out, in] as Hugging Face stores them. `orientation` is "in-out" or
"out-in" (DeepSpeed's flag int8 stands for "out-in", of whatever dtype). Biases have one dim. A tensor as large on a
rank as the whole is whole there. A part larger than the whole would be a merge and is refused. Source: DeepSpeed 0.19.8
`module_inject/auto_tp.py` ReplaceWithTensorSlicing (experts.md 27.1). There remainders are dropped, parts are always
equal thirds, and scales are attached whole: see docs/slicing.md.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from shardproof.parallel.communication.layout import Cut, Placement
from shardproof.parallel.slicing.held import Held, beside, in_turn
from shardproof.reference.errors import CaseError

ORIENTATIONS = ("in-out", "out-in")
Shape = tuple[int, ...]


def features_dim(shape: Shape, orientation: str) -> int:
    """The dim of the output features of a weight or bias of this shape.

    Raises CaseError for an unknown orientation or a shape of neither.
    """
    if orientation not in ORIENTATIONS:
        raise CaseError("orientation", orientation, "is not a known word", "|".join(ORIENTATIONS))
    if len(shape) not in (1, 2):
        raise CaseError("shape", shape, "must be that of a weight [2 dims] or a bias [1 dim]", "(768, 2304)")
    return int(len(shape) == 2 and orientation == "in-out")


def parts_held(parts: Sequence[int], ranks: int) -> Held:
    """Equal shares of every part, which lie one behind the other. Raises CaseError where one leaves a remainder."""
    if any(length % ranks for length in parts):
        legal = str(tuple(-(-length // ranks) * ranks for length in parts))
        raise CaseError("parts", tuple(parts), f"must each be a multiple of ranks={ranks}", legal)
    starts = itertools.accumulate(parts, initial=0)
    return beside(
        *(in_turn([length // ranks] * ranks, first=start) for length, start in zip(parts, starts, strict=False))
    )


def strided(src: Shape, dst: Shape, *, ranks: int, parts: Sequence[int], orientation: str = "in-out") -> Placement:
    """How a weight or bias of shape `src`, made of `parts` along its output features, becomes `dst` on each rank.

    `parts` sum to those features. Raises CaseError for shapes between which there is no such cut.
    """
    dim = features_dim(src, orientation)
    if sum(parts) != src[dim]:
        raise CaseError("parts", tuple(parts), f"must sum to the {src[dim]} output features", f"({src[dim]},)")
    return _cut(src, dst, dim, parts, ranks)


def plain(src: Shape, dst: Shape, *, ranks: int, orientation: str = "in-out") -> Placement:
    """How a weight or bias of shape `src` becomes the contiguous part `dst` on each rank, along the dim that differs.

    Raises CaseError when both dims differ, and for shapes between which there is no such cut.
    """
    dim = features_dim(src, orientation)
    if len(src) == 2 == len(dst) and src[1 - dim] != dst[1 - dim]:
        dim = 1 - dim
    return _cut(src, dst, dim, (src[dim],), ranks)


def _cut(src: Shape, dst: Shape, dim: int, parts: Sequence[int], ranks: int) -> Placement:
    if len(src) != len(dst) or any(a != b for d, (a, b) in enumerate(zip(src, dst, strict=True)) if d != dim):
        legal = (*src[:dim], src[dim] // ranks, *src[dim + 1 :])
        raise CaseError("dst", dst, f"must differ from src={src} in one dim alone", str(legal))
    if src[dim] == dst[dim]:
        return Placement(shape=src)
    if dst[dim] > src[dim]:
        rule = f"is larger than src={src}: slicing cuts and never merges"
        raise CaseError("dst", dst, rule, f"merge the shards first, then dst with {src[dim] // ranks} in dim {dim}")
    if dst[dim] * ranks != src[dim]:
        rule = f"times ranks={ranks} is not the {src[dim]} of dim {dim}: the rest would be lost"
        raise CaseError("dst", dst, rule, f"dst with {src[dim]} / ranks in dim {dim}, where ranks divides it")
    return Placement(shape=src, cuts=(Cut(axis="tp", dim=dim, held=parts_held(parts, ranks)),))


def scales(place: Placement, grid: Shape) -> Placement:
    """How the scales of a quantised weight lie when the weight lies as `place`: dequantising commutes with slicing.

    `grid` is the shape of the scales: entry (i, j) is the scale of an equal block of the weight. In a dim, 1 is one
    scale for all of it. A rank holds the scales of the blocks that it holds, in the order in which it holds them.
    Raises CaseError for a grid that is none of the weight, and for a cut that falls inside a block.
    """
    if len(grid) != len(place.shape) or any(size % count for size, count in zip(place.shape, grid, strict=True)):
        raise CaseError(
            "grid", grid, f"must divide the weight {place.shape} into equal blocks", str((1,) * len(place.shape))
        )
    if not place.cuts or grid[place.cuts[0].dim or 0] == 1:
        return Placement(shape=grid)
    cut, dim = place.cuts[0], place.cuts[0].dim or 0
    block = place.shape[dim] // grid[dim]
    for part in itertools.chain.from_iterable(cut.held):
        if part.start % block or part.stop % block:
            rule = f"has blocks of {block} in dim {dim}, and a cut at {part.start}..{part.stop} falls inside one"
            raise CaseError("grid", grid, rule, f"1 in dim {dim}, or blocks that end at every cut")
    held = tuple(tuple(range(part.start // block, part.stop // block) for part in own) for own in cut.held)
    return Placement(shape=grid, cuts=(replace(cut, held=held),))
