"""Replaces the initial weights of a program by those of another recording (`--same-init`).

A full value is joined from the parts that all ranks of the other launch recorded. A parameter gets its part by its
stated layout. If none is stated, its shape decides: it is whole, or sharded along the only dim and over the only group
that fit. If several groups fit, it is the one whose ranks drew different parts in an earlier recording of the launch,
since replicas draw the same. That recording may also hold names: those of parameters that the other launch calls
otherwise, as a stage that numbers its layers from 0 does.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness.outcome.blocks import held_indices, is_dtensor
from shardproof.harness.outcome.merging import bits_of
from shardproof.harness.programs.tensors.names import NamedParameter
from shardproof.harness.programs.values import RankValues, ValueRow, read_values
from shardproof.harness.torch_internals.world import own_groups

NO_CUT = "no one cut"
"""The beginning of a reason: no group, or several, have the size of a parameter's shards."""
NAMES = "names.json"
"""The file of names in an earlier recording: rank -> name of a parameter -> its name in the other launch."""
_Parts = list[tuple[RankValues, ValueRow]]


@dataclass(slots=True)
class InitialValues:
    """The initial values in `folder` ("": nothing is changed). `lacking` says what did not get one, and why.

    `drawn`: digests of what the program drew itself. `parts_of` is a folder with those of all ranks, and with names
    ("": none).
    """

    folder: str
    parts_of: str = ""
    drawn: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)
    _parts: dict[str, _Parts] = field(default_factory=dict)
    _drawn_by: dict[int, dict[str, str]] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)

    def overwrite(self, named: Sequence[NamedParameter]) -> None:
        """Give these parameters and buffers the other recording's values. Raises RequestError if it has none."""
        if not self.folder:
            return
        if not self._parts:
            for one in read_values(Path(self.folder)):
                for row in one.rows:
                    if row.kind in ("param", "buffer"):
                        self._parts.setdefault(row.name, []).append((one, row))
            if self.parts_of:
                earlier = read_values(Path(self.parts_of))
                self._drawn_by = {one.rank: one.about.get("drawn_parts", {}) for one in earlier}
                rank = str(dist.get_rank() if dist.is_initialized() else 0)
                self._names = json.loads(Path(self.parts_of, NAMES).read_text(encoding="utf-8")).get(rank, {})
        for parameter in named:
            if not parameter.alias_of:
                reason = self._overwrite(parameter)
                if reason:
                    self.lacking[parameter.place.name] = reason

    def _overwrite(self, named: NamedParameter) -> str:
        """Overwrite one parameter. Returns why that is not possible, else ""."""
        name = named.place.name
        if digest := _digest(named.tensor):
            self.drawn[name] = digest
        parts = self._parts.get(self._names.get(name, name))
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
            return self._write_parts(named, full)

    def _write_parts(self, named: NamedParameter, full: Tensor) -> str:
        """Write a full value into a plain tensor, part by part. Returns why that is not possible, else ""."""
        tensor = named.tensor.data
        positions = torch.arange(tensor.numel()).reshape(tensor.shape)  # its parts state their offsets
        flat = tensor.reshape(-1) if tensor.is_contiguous() else None
        if flat is None:
            return "it is not contiguous"
        for part in named.split(positions):
            shape, offsets = part.words.get("global_shape"), part.words.get("offsets")
            source = full.reshape(shape) if shape is not None and math.prod(shape) == full.numel() else full
            if shape is None or offsets is None:
                offsets = self._find_offsets(named, tuple(part.local.shape), full)
            elif tuple(source.shape) != tuple(shape):
                return f"its full shape is {tuple(shape)}, that of the other recording {tuple(full.shape)}"
            if offsets is None:
                return f"{NO_CUT} of {tuple(full.shape)} gives {tuple(part.local.shape)}"
            for dim, (offset, length) in enumerate(zip(offsets, part.local.shape, strict=True)):
                source = source.narrow(dim, offset, length)
            flat[part.local.reshape(-1).to(flat.device)] = source.reshape(-1).to(flat)
        return ""

    def _find_offsets(self, named: NamedParameter, local: tuple[int, ...], full: Tensor) -> tuple[int, ...] | None:
        """The offsets of a rank's part by shape, and by what ranks drew; None unless there is only one possibility."""
        shape = tuple(full.shape)
        if local == shape:
            return (0,) * len(shape)
        cut = [dim for dim in range(len(shape)) if local[dim] != shape[dim]] if len(local) == len(shape) else []
        if len(cut) != 1 or not local[cut[0]] or shape[cut[0]] % local[cut[0]]:
            return None
        name, size = named.place.name, shape[cut[0]] // local[cut[0]]
        groups = own_groups(size)
        drawn = {rank: own[name] for rank, own in self._drawn_by.items() if name in own}
        apart = [ranks for ranks in groups if len({drawn[rank] for rank in ranks if rank in drawn}) == size]
        places = {ranks.index(dist.get_rank()) for ranks in apart or groups}
        if len(places) != 1:
            return None
        start = places.pop() * local[cut[0]]
        return tuple(start if dim == cut[0] else 0 for dim in range(len(shape)))


def _digest(tensor: Any) -> str:
    """A digest of a rank's part of a tensor, "" for one whose elements are all equal: many others are equal to it."""
    local = (tensor.to_local() if is_dtensor(tensor) else tensor).detach()
    if not local.numel() or bool((local == local.flatten()[0]).all()):
        return ""
    return hashlib.sha256(bits_of(local.contiguous()).cpu().numpy().tobytes()).hexdigest()[:16]


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
