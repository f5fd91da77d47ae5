"""Shards by rows: every parameter is cut along dim 0 over the data ranks, and a unit of parameters travels together.

Rank r of n holds rows [r*c, (r+1)*c) of d rows, with c = ceil(d/n), as torch.chunk cuts them. The last shards may be
shorter or empty. Every shard is padded to c rows in collectives, so a unit of parameters j sends and receives

    U = sum over j of ceil(d_j/n) * n * (elements of a row of j)

elements, and rank r's part of the gathered buffer holds its padded shards end to end. A tensor without dims counts as
one row of one element. Source: torch 2.13 `fully_shard` (around.md 15.3); arXiv:1910.02054 for ZeRO.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]


def padded_rows(rows: int, ranks: int) -> int:
    """Rows of one rank's padded shard."""
    return -(-rows // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters that are gathered and reduced together, by name, over `ranks` ranks. Sizes count elements."""

    shapes: Mapping[str, Shape]
    ranks: int

    @property
    def shard_elements(self) -> int:
        """Elements of a rank's part of the buffer, padding included."""
        return sum(padded_rows(_rows(shape), self.ranks) * _row(shape) for shape in self.shapes.values())

    @property
    def elements(self) -> int:
        """The whole buffer: payload of an all-gather's output and of a reduce-scatter's input."""
        return self.ranks * self.shard_elements

    def places(self) -> Iterable[tuple[str, int, int]]:
        """(parameter, first element, elements) of every padded shard within one rank's part."""
        first = 0
        for name, shape in self.shapes.items():
            size = padded_rows(_rows(shape), self.ranks) * _row(shape)
            yield name, first, size
            first += size


def _rows(shape: Shape) -> int:
    return shape[0] if shape else 1


def _row(shape: Shape) -> int:
    return math.prod(shape[1:])
