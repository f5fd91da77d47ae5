"""The outcome of one rank: named values turned into blocks of full tensors, without any communication.

A value is a full tensor or array of numpy, a number, one shard, several shards (a fused weight), or a DTensor. `blocks`
reads each inside the rank, because a DTensor knows its place only there; `merging` puts the blocks of all ranks
together outside. Offsets and shapes count elements. Source of the DTensor rules: torch.distributed.tensor placement
types (`Shard` cuts like `torch.chunk`, `_StridedShard` cuts every one of its `split_factor` pieces).
"""

import itertools
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from shardproof.harness.protocols import check_inside
from shardproof.harness.torch_internals.world import wait_pending

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block in one form for all kinds of values: the local tensor, detached, on the CPU, waited for.

    `whole`: the value was a full tensor. `terms` are this rank's coordinates on the mesh axes over which a DTensor is
    still to be reduced by `reduce_op`. The full value is that reduction, done outside the ranks.
    """

    local: Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    whole: bool = False
    terms: tuple[int, ...] = ()
    reduce_op: str = ""

    def __post_init__(self) -> None:
        check_inside(tuple(self.local.shape), self.offsets, self.global_shape)

    @property
    def region(self) -> tuple[tuple[int, int], ...]:
        """First and past-the-last index along each dim of the full tensor."""
        return tuple([(o, o + n) for o, n in zip(self.offsets, self.local.shape, strict=True)])

    def part_of(self, full: Tensor) -> Tensor:
        """The part of a full tensor at the place of this block, as a view."""
        return full[tuple(slice(a, b) for a, b in self.region)]

    def common_with(self, other: "Block") -> tuple[tuple[int, int], ...] | None:
        """The region that both hold, None if they have no element in common."""
        common = tuple([(max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.region, other.region, strict=True)])
        return common if all(a < b for a, b in common) else None

    def local_at(self, region: tuple[tuple[int, int], ...]) -> Tensor:
        """The local tensor at a region of the full one that this block holds."""
        return self.local[tuple(slice(a - o, b - o) for (a, b), o in zip(region, self.offsets, strict=True))]


def localize(outcome: object) -> dict[str, tuple[Block, ...]]:
    """All values of one rank as blocks; call it inside the rank. Raises ValueError naming the value it cannot read."""
    read: dict[str, tuple[Block, ...]] = {}
    if not isinstance(outcome, Mapping):
        kind = "nothing (None)" if outcome is None else type(outcome).__name__
        rule = "it must return a mapping of names to tensors; legal: return {'loss/0': loss}"
        raise ValueError(f"a subject returned {kind}; {rule}")
    for name, value in outcome.items():
        if not isinstance(name, str):
            raise ValueError(f"outcome {name!r}: a name must be text, not {type(name).__name__}; legal: 'loss/0'")
        if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ValueError(f"outcome {name!a}: a name must be text that a file can hold; legal: 'loss/0'")
        try:
            read[name] = blocks(value)
        except (ValueError, TypeError) as problem:
            raise ValueError(f"outcome {name!r}: {problem}") from problem
    return read


def blocks(value: object) -> tuple[Block, ...]:
    """Blocks of a value; several shards give several blocks, an empty iterable gives none.

    Raises ValueError for what is no value, such as a mapping.
    """
    if is_dtensor(value):
        return _of_dtensor(value)
    if isinstance(value, Mapping):
        rule = f"a {type(value).__name__} is not a value; legal: each of its tensors under a name of its own"
        raise ValueError(f"{rule}, such as 'moments/0/weight'")
    if hasattr(value, "__array__") and not isinstance(value, Tensor | float):  # of numpy
        value = torch.tensor(value)
    if isinstance(value, bool | int | float):
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    if isinstance(value, Tensor):
        full = _settle_tensor(value)
        return (Block(local=full, offsets=(0,) * full.dim(), global_shape=tuple(full.shape), whole=True),)
    if isinstance(value, Iterable):
        return tuple(block for part in value for block in _of_shard(part))
    return _of_shard(value)


def _of_shard(value: object) -> tuple[Block, ...]:
    try:
        local, offsets, shape = value.local, value.offsets, value.global_shape  # type: ignore[attr-defined]
    except AttributeError:
        raise ValueError(
            f"{type(value).__name__} is not a value: return a tensor, a DTensor, "
            "Shard(local, offsets, global_shape) or an iterable of shards"
        ) from None
    local = _settle_tensor(local)
    try:
        offsets, shape = tuple(map(operator.index, offsets)), tuple(map(operator.index, shape))
    except TypeError:
        raise ValueError(
            f"offsets={offsets} and global_shape={shape} must be whole numbers; "
            f"legal: offsets={(0,) * local.dim()}, global_shape={tuple(local.shape)}"
        ) from None
    return (Block(local=local, offsets=offsets, global_shape=shape),)


def _settle_tensor(local: Tensor) -> Tensor:
    """The tensor itself: detached, on the CPU, and waited for if a functional collective still computes it.

    Raises ValueError for anything but a plain tensor of numbers: native code crashes when it reads the bytes of others.
    """
    local = wait_pending(local)
    if lack := _lack_of_tensor(local):
        raise ValueError(f"{lack[0]}; legal: {lack[1]}")
    plain = local.detach().as_subclass(Tensor)  # ranks may each have a class of their own, which torch cannot compare
    return plain.to("cpu").resolve_conj().resolve_neg()


def _lack_of_tensor(local: object) -> tuple[str, str] | None:
    """Why a value is no plain tensor of numbers, and what would be one; None if it is one."""
    if not isinstance(local, Tensor):
        return f"{type(local).__name__} is not a tensor", "a torch.Tensor"
    if local.is_nested:
        return "a nested tensor has no one shape", "one name for each of its parts"
    if local.is_quantized:
        return "a quantized tensor has no numbers to compare", "its dequantize()"
    if local.layout is not torch.strided:
        return f"the layout is {dtype_word(local.layout)}, and blocks are dense", "its to_dense()"
    if local.is_meta:
        return "the tensor lies on the meta device and has no numbers", "a tensor on the device that was given"
    if not _is_readable(local.dtype):
        return f"numbers of {dtype_word(local.dtype)} cannot be read", "a tensor of another dtype"
    if type(local).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"{type(local).__name__} is a tensor only by its own rules", "the plain tensor inside of it"
    return None


@lru_cache(maxsize=64)
def _is_readable(dtype: torch.dtype) -> bool:
    """Whether torch can convert numbers of this dtype: some dtypes have a name and nothing else."""
    try:
        return dtype.is_complex or torch.empty(1, dtype=dtype, device="cpu").double().numel() == 1
    except RuntimeError:  # "not implemented for"
        return False


def dtype_word(what: torch.layout | torch.dtype) -> str:
    """A dtype or layout in the case language: float32."""
    return str(what).removeprefix("torch.")


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether this is a DTensor, without importing its module: the import takes half as long as that of torch."""
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(value, loaded.DTensor)


def _of_dtensor(value: "DTensor") -> tuple[Block, ...]:
    """The blocks of this rank from the DTensor's spec alone: no collective is issued."""
    from torch.distributed.tensor import Partial  # noqa: PLC0415  (see is_dtensor)

    mesh, full = value.device_mesh, tuple(value.shape)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    indices = held_indices(value)
    terms: list[int] = []
    reduce_ops: set[str] = set()
    for place, placement in zip(coordinate, value.placements, strict=True):
        if type(placement) is Partial:
            terms.append(place)
            reduce_ops.add(placement.reduce_op)
        elif placement.is_partial():  # partial norms and masks are not simply reduced
            raise ValueError(f"a DTensor with the pending reduction {placement} has no blocks; redistribute it first")
    if len(reduce_ops) > 1:
        raise ValueError(f"a DTensor that mixes Partial reductions ({', '.join(sorted(reduce_ops))}) has no one value")
    block = partial(Block, global_shape=full, terms=tuple(terms), reduce_op="".join(reduce_ops))
    return tuple(
        block(local=box, offsets=offsets) for box, offsets in _cut_into_boxes(_settle_tensor(value.to_local()), indices)
    )


def held_indices(value: "DTensor") -> list[Tensor]:
    """The indices of the full tensor that this rank's local tensor holds, by dim."""
    coordinate = value.device_mesh.get_coordinate()
    indices = [torch.arange(size) for size in value.shape]
    for size, place, placement in zip(value.device_mesh.shape, coordinate or (), value.placements, strict=True):
        if not placement.is_replicate() and not placement.is_partial():
            dim = int(getattr(placement, "dim"))  # noqa: B009  (the base class Placement declares no dim)
            pieces = indices[dim].chunk(int(getattr(placement, "split_factor", 1)))
            indices[dim] = torch.cat([_chunk_of_indices(piece, size, place) for piece in pieces])
    return indices


def _chunk_of_indices(indices: Tensor, parts: int, which: int) -> Tensor:
    """The part of `indices` that rank `which` of `parts` holds; empty if `torch.chunk` makes fewer parts."""
    width = -(-len(indices) // parts)
    return indices[which * width : (which + 1) * width]


def _cut_into_boxes(local: Tensor, indices: list[Tensor]) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Cut a local tensor into boxes that are contiguous in the full tensor: (box, offsets)."""
    own, stated = tuple(local.shape), tuple(map(len, indices))
    if own != stated:
        raise ValueError(f"the local tensor of a DTensor has shape {own}; its placements say {stated}")
    starts = [_find_runs(i.tolist()) for i in indices]
    boxes = []
    for corner in itertools.product(*starts):
        box = local
        for dim, (first, length, _) in enumerate(corner):
            box = box.narrow(dim, first, length)
        boxes.append((box, tuple(offset for _, _, offset in corner)))
    return boxes


def _find_runs(indices: list[int]) -> list[tuple[int, int, int]]:
    """Runs of consecutive numbers: (position in the list, length, first number)."""
    if not indices:
        return [(0, 0, 0)]
    firsts = [p for p, i in enumerate(indices) if p == 0 or indices[p - 1] + 1 != i]
    return [(p, q - p, indices[p]) for p, q in zip(firsts, [*firsts[1:], len(indices)], strict=True)]
