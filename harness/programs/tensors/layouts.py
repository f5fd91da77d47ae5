"""The place of a rank's part in the full tensor, as far as the program states it.

DTensors state it themselves (FSDP2's parameters too). DistributedDataParallel, the flat parameters of FSDP1, and the
attributes that Megatron gives its parameters state it for parameters, and so for their gradients and states. For
anything else nothing is stated. Offsets and shapes count elements.
"""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardproof.harness.outcome.blocks import blocks, is_dtensor
from shardproof.harness.torch_internals.dispatch import past_modes
from shardproof.harness.torch_internals.flat_parameters import Piece


class StatedPart(NamedTuple):
    """A rank's part of a tensor: the plain tensor, the fields of its row (values.ValueRow), what is appended to its
    name.
    """

    local: Tensor
    words: Mapping[str, Any]
    below: str = ""


Split = Callable[[Tensor], list[StatedPart]]
"""Splits a parameter, or a tensor of its shape, into the parts whose place is stated."""


def split_value(value: Tensor) -> list[StatedPart]:
    """The parts of a tensor that states its own place, or the tensor alone. Raises ValueError for unreadable ones."""
    if not is_dtensor(value):
        return [StatedPart(blocks(value)[0].local, {})]
    mesh = value.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    axes = tuple(zip(names, mesh.shape, mesh.get_coordinate() or (0,) * mesh.ndim, strict=True))
    placed = list(zip(axes, value.placements, strict=True))
    words: dict[str, Any] = {"stated_by": "dtensor", "axes": axes, "global_shape": tuple(value.shape)}
    words["replicated"] = any(axis[1] > 1 and placement.is_replicate() for axis, placement in placed)
    words["pending_axes"] = tuple(axis[0] for axis, placement in placed if placement.is_partial())
    norms = {getattr(placement, "norm_type", None) for _axis, placement in placed if placement.is_partial()} - {None}
    if norms:  # the norm of sharded gradients, which the program alone may reduce
        words |= {"pending": f"norm {float(str(norms.pop())):g}", "offsets": (0,) * value.dim()}
        return [StatedPart(blocks(value.to_local())[0].local, words)]
    return [
        StatedPart(block.local, words | {"offsets": block.offsets, "pending": block.reduce_op})
        for block in blocks(value)
    ]


def split_of(parameter: Tensor, wrapper: nn.Module | None, piece: Piece | None) -> Split:
    """How to split a parameter. `wrapper` is the innermost DDP or FSDP2 module around it, `piece` its part in FSDP1."""
    shape = tuple(parameter.shape)
    if piece is not None:
        stated: Split = lambda value: _piece(value, piece, ())  # noqa: E731  (below it is one of several)
    elif is_dtensor(parameter):
        name = "dtensor" if wrapper is None else "fsdp"
        return lambda value: [part._replace(words=_state_anew(part.words, name)) for part in split_value(value)]
    elif hasattr(parameter, "tensor_model_parallel"):
        stated = lambda value: _megatron(value, parameter)  # noqa: E731
    elif isinstance(wrapper, nn.parallel.DistributedDataParallel):
        words = _of_group(wrapper.process_group, shape)
        stated = lambda value: [StatedPart(value, words)]  # noqa: E731
    else:
        return split_value

    def split(value: Tensor) -> list[StatedPart]:
        plain = not is_dtensor(value) and tuple(value.shape) == shape
        return stated(blocks(value)[0].local) if plain else split_value(value)

    return split


def split_of_flat(flat: Tensor, pieces: tuple[Piece, ...]) -> Split:
    """How to split the flat parameter of FSDP1 into the pieces of the parameters that it holds."""
    shape = tuple(flat.shape)

    def split(value: Tensor) -> list[StatedPart]:
        if tuple(value.shape) != shape:
            return split_value(value)
        local = blocks(value)[0].local
        return [part for piece in pieces for part in _piece(local, piece, (piece.offset,))]

    return split


def find_place_in(parameter: Tensor, tensor: Tensor) -> int | None:
    """Where a view of a parameter begins in it, in elements; None for other tensors."""
    plain = all(type(one).__torch_dispatch__ is Tensor.__torch_dispatch__ for one in (parameter, tensor))
    if not plain or tensor.dtype is not parameter.dtype or not tensor.numel():
        return None
    with past_modes():
        start, odd = divmod(tensor.data_ptr() - parameter.data_ptr(), tensor.element_size())
    return start if not odd and 0 <= start <= parameter.numel() - tensor.numel() else None


def split_of_master(parameter: Tensor, master: Tensor, split: Split) -> Split:
    """How to split the master copy of a parameter: like the parameter if all of it is copied, as a flat piece if it is
    a view of a whole one, else as it states itself.
    """
    shape, start = tuple(parameter.shape), find_place_in(parameter, master)

    def split_flat(value: Tensor) -> list[StatedPart]:
        if value.numel() == parameter.numel():  # nothing states whether other ranks have a copy of the master
            return [part._replace(words={**part.words, "replicated": False}) for part in split(value.reshape(shape))]
        whole = all(part.words.get("global_shape") in (None, shape) for part in split(parameter))
        if start is None or value.numel() != master.numel() or not whole:
            return split_value(value)
        words = {"stated_by": "memory", "global_shape": (parameter.numel(),), "offsets": (start,)}
        return [StatedPart(blocks(value)[0].local.reshape(-1), words)]

    return split_flat


def _piece(local: Tensor, piece: Piece, at: tuple[int, ...]) -> list[StatedPart]:
    """The part of a flattened parameter: the tensor itself, or the elements of a flat one from `at` on."""
    if not piece.length:
        return []
    own = local.reshape(-1) if not at else local.narrow(0, at[0], piece.length)
    words = {"stated_by": "fsdp", "global_shape": (math.prod(piece.shape),), "offsets": (piece.start,)}
    return [StatedPart(own, words, piece.name if at else "")]


def _state_anew(words: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return {**words, "stated_by": name} if words.get("stated_by") else words


def _of_group(group: Any, shape: tuple[int, ...]) -> Mapping[str, Any]:
    """What DDP states of its parameters. They are replicas everywhere only if its group has all ranks."""
    size = dist.get_world_size(group)
    words: dict[str, Any] = {"stated_by": "ddp", "replicated": size > 1, "axes": (("ddp", size, dist.get_rank(group)),)}
    if size == dist.get_world_size():
        words |= {"global_shape": shape, "offsets": (0,) * len(shape)}
    return words


def _megatron(local: Tensor, parameter: Any) -> list[StatedPart]:
    """What Megatron's attributes state of a parameter; with `allreduce` false it belongs to an expert."""
    kind = "tensor_model_parallel" if getattr(parameter, "allreduce", True) else "expert_tensor_parallel"
    size, rank = _parallel(kind)
    copies = _parallel("data_parallel" if kind == "tensor_model_parallel" else "expert_data_parallel")
    axes = (("dp", *copies), ("tp", size, rank))
    shape, split = tuple(local.shape), bool(parameter.tensor_model_parallel) and size > 1
    words = {"stated_by": "megatron", "axes": axes, "replicated": copies[0] > 1 or (size > 1 and not split)}
    if not split:
        return [StatedPart(local, words | {"global_shape": shape, "offsets": (0,) * len(shape)})]
    dim, pieces = int(parameter.partition_dim), int(getattr(parameter, "partition_stride", 1))
    whole = tuple(length * size if place == dim else length for place, length in enumerate(shape))
    found = []
    for number, box in enumerate(local.tensor_split(pieces, dim)):
        offset = (number * size + rank) * box.shape[dim]
        offsets = tuple(offset if place == dim else 0 for place in range(len(shape)))
        found.append(StatedPart(box, words | {"global_shape": whole, "offsets": offsets}))
    return found


def _parallel(kind: str) -> tuple[int, int]:
    """(size, own rank) of one of Megatron's groups; (1, 0) if there is no such group."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    try:
        return int(getattr(state, f"get_{kind}_world_size")()), int(getattr(state, f"get_{kind}_rank")())
    except (AttributeError, AssertionError, ValueError, RuntimeError):  # Megatron, before it is initialised
        return 1, 0


def tensors_in(value: object, levels: int = 4) -> list[tuple[str, Tensor]]:
    """The tensors of a nested result with their places: "", "0", "logits", "1/hidden"."""
    if isinstance(value, torch.Tensor):
        return [("", value)]
    if not levels or value is None or isinstance(value, str | int | float | nn.Module):
        return []
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, tuple | list):
        parts = [(str(place), part) for place, part in enumerate(value)]
    else:
        parts = list(getattr(value, "__dict__", {}).items())
    inside = [(key, tensors_in(part, levels - 1)) for key, part in parts]
    return [(f"{key}/{leaf}" if leaf else key, tensor) for key, found in inside for leaf, tensor in found]
