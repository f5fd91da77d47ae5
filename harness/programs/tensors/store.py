"""The values of one step of a rank, held within a budget of bytes until the step ends.

The largest tensors are left out first: one for which there is no room replaces larger ones, or is left out itself. The
row of a tensor that is left out says so.
"""

import heapq
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from shardproof.harness.outcome.blocks import dtype_word
from shardproof.harness.programs.tensors.layouts import Split, StatedPart, split_value
from shardproof.harness.programs.tensors.names import ModulePath
from shardproof.harness.programs.values import ValueRow, append_values
from shardproof.harness.torch_internals.dispatch import past_modes


@dataclass(slots=True, kw_only=True)
class StepValues:
    """The rows of the current step and copies of their tensors, at most `budget_bytes`; `number` counts rows."""

    budget_bytes: int
    step: int = 0
    number: int = 0
    rows: list[ValueRow] = field(default_factory=list)
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _first: dict[str, ValueRow] = field(default_factory=dict)
    _largest: list[tuple[int, int, str]] = field(default_factory=list)
    _bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def make_row(self, kind: str, place: ModulePath, *, call: int = 0, leaf: str = "", alias_of: str = "") -> ValueRow:
        """A row of the current step, without the fields of its tensor."""
        wrapped, step = "" if place.wrapped == place.name else place.wrapped, self.step
        row = ValueRow(kind=kind, step=step, name=place.name, wrapped=wrapped, call=call, leaf=leaf, dtype="", shape=())
        return replace(row, alias_of=alias_of) if alias_of else row

    def add(self, row: ValueRow, value: Tensor, split: Split = split_value) -> tuple[str, ...]:
        """Add copies of the parts of a tensor. `row` has the fields of their rows that do not depend on the tensor.
        Returns the keys of the parts.
        """
        with torch.no_grad():
            try:
                parts = split(value)
            except (ValueError, TypeError) as problem:
                shape, dtype = tuple(value.shape), dtype_word(value.dtype)
                self._append(replace(row, shape=shape, dtype=dtype, left_out=str(problem)))
                return ()
            return tuple(self._add_part(row, part) for part in parts)

    def repeat(self, row: ValueRow, keys: tuple[str, ...]) -> None:
        """Add rows for a tensor whose parts are stored under these keys."""
        with self._lock:
            for key in keys:
                first = self._first[key]
                stated = {name: getattr(row, name) for name in ("name", "wrapped", "call", "leaf", "alias_of")}
                self.rows.append(replace(first, **stated, number=self._next()))

    def write(self, folder: Path, rank: int) -> None:
        """Write the step and drop everything. Raises OSError."""
        with self._lock:
            rule = f"does not fit into the budget of {self.budget_bytes:,} bytes a step beside smaller ones"
            rows = [row if row.key in self._tensors else self._without_tensor(row, rule) for row in self.rows]
            append_values(folder, rank, self.step, rows, self._tensors)
            self.rows, self._tensors, self._first, self._largest, self._bytes = [], {}, {}, [], 0

    def _add_part(self, row: ValueRow, part: StatedPart) -> str:
        local = part.local
        name = f"{row.name}.{part.below}" if row.name and part.below else row.name or part.below
        row = replace(row, name=name, shape=tuple(local.shape), dtype=dtype_word(local.dtype), **part.words)
        size = local.numel() * local.element_size()
        with self._lock:
            number = self._next()
            key = f"{number}:{row.kind}:{name}"
            self._first[key] = replace(row, number=number, key=key)
            self.rows.append(self._first[key])
            if not self._make_room(size):
                return key
            self._bytes += size
            heapq.heappush(self._largest, (-size, -number, key))
            with past_modes():
                copied = local.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self._tensors[key] = copied
        return key

    def _make_room(self, size: int) -> bool:
        """Drop larger tensors until one of this size fits. Returns whether it does."""
        while self._bytes + size > self.budget_bytes and self._largest and -self._largest[0][0] > size:
            larger, _number, key = heapq.heappop(self._largest)
            del self._tensors[key]
            self._bytes += larger
        return self._bytes + size <= self.budget_bytes

    def _append(self, row: ValueRow) -> None:
        with self._lock:
            self.rows.append(replace(row, number=self._next()))

    def _next(self) -> int:
        self.number += 1
        return self.number - 1

    def _without_tensor(self, row: ValueRow, rule: str) -> ValueRow:
        return replace(row, key="", left_out=row.left_out or rule)
