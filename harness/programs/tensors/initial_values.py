"""The initial weights of another recording in the place of a program's own (`--same-init`).

A full value is put together from the parts that all ranks of the other launch recorded. A parameter gets its part as
its own layout says; where nothing is stated, as its shape says: the whole, or the only cut along one dim for which
there is one group of that size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.outcome.blocks import held_indices, is_dtensor
from shardproof.harness.programs.tensors.names import NamedParameter
from shardproof.harness.programs.values import RankValues, ValueRow, read_values
from shardproof.harness.torch_internals.world import own_places

_Parts = list[tuple[RankValues, ValueRow]]


@dataclass(slots=True)
class InitialValues:
    """The initial values in `folder` ("": nothing is changed); `lacking`: what did not get one, and why."""

    folder: str
    lacking: dict[str, str] = field(default_factory=dict)
    _parts: dict[str, _Parts] = field(default_factory=dict)

    def overwrite(self, named: Sequence[NamedParameter]) -> None:
        """Give these parameters and buffers the other recording's values. Raises RequestError for another folder."""
        if not self.folder:
            return
        if not self._parts:
            for one in read_values(Path(self.folder)):
                for row in one.rows:
                    if row.kind in ("param", "buffer"):
                        self._parts.setdefault(row.name, []).append((one, row))
        for parameter in named:
            if not parameter.alias_of:
                reason = self._overwrite(parameter)
                if reason:
                    self.lacking[parameter.place.name] = reason

    def _overwrite(self, named: NamedParameter) -> str:
        """Overwrite one parameter. Returns why that is not possible, else ""."""
        parts = self._parts.get(named.place.name)
        if not parts:
            return "the other recording has no parameter of this name"
        full = _full(parts)
        if isinstance(full, str):
            return full
        tensor: Any = named.tensor
        with torch.no_grad():
            if is_dtensor(tensor):
                if tuple(tensor.shape) != tuple(full.shape):
                    return f"its shape is {tuple(tensor.shape)}, that of the other recording {tuple(full.shape)}"
                for dim, indices in enumerate(held_indices(tensor)):
                    full = full.index_select(dim, indices)
                tensor.to_local().copy_(full)
                return ""
            return _write_parts(named, full)


def _write_parts(named: NamedParameter, full: Tensor) -> str:
    """Write a full value into a plain tensor, part by part. Returns why that is not possible, else ""."""
    tensor = named.tensor.data
    positions = torch.arange(tensor.numel()).reshape(tensor.shape)  # a part of these says where the part lies
    flat = tensor.reshape(-1) if tensor.is_contiguous() else None
    if flat is None:
        return "it is not contiguous"
    for part in named.split(positions):
        shape, offsets = part.words.get("global_shape"), part.words.get("offsets")
        source = full.reshape(shape) if shape is not None and math.prod(shape) == full.numel() else full
        if shape is None or offsets is None:
            offsets = _find_offsets(tuple(part.local.shape), tuple(full.shape))
        elif tuple(source.shape) != tuple(shape):
            return f"its full shape is {tuple(shape)}, that of the other recording {tuple(full.shape)}"
        if offsets is None:
            return f"no one cut of {tuple(full.shape)} gives {tuple(part.local.shape)}"
        for dim, (offset, length) in enumerate(zip(offsets, part.local.shape, strict=True)):
            source = source.narrow(dim, offset, length)
        flat[part.local.reshape(-1).to(flat.device)] = source.reshape(-1).to(flat)
    return ""


def _find_offsets(local: tuple[int, ...], full: tuple[int, ...]) -> tuple[int, ...] | None:
    """Where a rank's part begins by shape alone: None unless there is only one possibility."""
    if local == full:
        return (0,) * len(full)
    if len(local) != len(full):
        return None
    cut = [dim for dim in range(len(full)) if local[dim] != full[dim]]
    if len(cut) != 1 or not local[cut[0]] or full[cut[0]] % local[cut[0]]:
        return None
    places = own_places(full[cut[0]] // local[cut[0]])
    return (
        tuple(places[0] * local[dim] if dim == cut[0] else 0 for dim in range(len(full))) if len(places) == 1 else None
    )


def _full(parts: _Parts) -> Tensor | str:
    """The full value of a parameter, or why there is none."""
    _ranks, first = parts[0]
    if any(row.left_out for _values, row in parts):
        return "the other recording has left it out"
    if first.global_shape is None or first.offsets is None:
        tensors = [values.tensor(row) for values, row in parts]
        alike = all(torch.equal(tensors[0], tensor) for tensor in tensors[1:])
        return tensors[0] if alike else "its ranks hold unlike parts of it, and nothing states which"
    found = torch.full(first.global_shape, math.nan, dtype=torch.float64)
    for values, row in parts:
        region = tuple(slice(a, a + n) for a, n in zip(row.offsets or (), row.shape, strict=True))
        found[region] = values.tensor(row).to(found)
    return "its ranks did not record all parts of it" if bool(found.isnan().any()) else found
