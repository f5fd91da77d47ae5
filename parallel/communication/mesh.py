"""The mesh: this rank's groups, one per axis, as explicit values. There is no process-wide state.

Ranks are global ranks, numbered as the case's `order` has it (Megatron-Core `RankGenerator`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch.distributed as dist

from shardproof.reference.case import Case

_TALKING = ("tp", "dp")
"""Axes of every mesh that are talked on even where they have one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """This rank's group along one axis: `rank` is its place in `ranks`, the group's global ranks in order."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: Any

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """All axes as one global rank sees them."""

    rank: int
    axes: Mapping[str, Axis]

    @classmethod
    def of(cls, case: Case) -> "Mesh":
        """Make the groups of every axis; every rank must call this, with the same case.

        Raises ValueError when the running world is not the case's.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if world_size != case.world_size:
            raise ValueError(
                f"world_size={world_size}: the case needs {'*'.join(case.mesh)}={case.world_size} ranks; "
                f"legal: {case.world_size} ranks"
            )
        axes: dict[str, Axis] = {}
        for name, groups in case.axes.items():
            # new_group is collective over the world: every rank makes every group in one order, its own or not. Mesh
            # axes of one rank get none unless in _TALKING: one a rank would be most of what a large world costs.
            talks = name not in case.mesh or name in _TALKING or len(groups[0]) > 1
            made = [(ranks, dist.new_group(list(ranks), group_desc=name) if talks else None) for ranks in groups]
            own = [(ranks, group) for ranks, group in made if rank in ranks]
            if not own:
                continue  # stages in the middle are in no group of `embedding`
            ranks, group = own[0]
            axes[name] = Axis(name=name, ranks=ranks, rank=ranks.index(rank), group=group)
        return cls(rank=rank, axes=axes)

    @cached_property
    def coordinates(self) -> dict[str, tuple[int, int]]:
        """Axis -> (this rank's place on it, ranks on it)."""
        return {name: (axis.rank, axis.size) for name, axis in self.axes.items()}

    def axis(self, name: str) -> Axis:
        """The axis of this name; raises ValueError for one that the case's mesh does not have."""
        if name not in self.axes:
            raise ValueError(f"axis={name}: is not an axis of this mesh; legal: {' '.join(self.axes)}")
        return self.axes[name]


def axis_size(case: Case, name: str) -> int:
    """Ranks along one axis of a case's mesh; needs no running world."""
    return case.axis_sizes[name]


def axis_rank(case: Case, name: str, rank: int) -> int:
    """The place of a global rank in its group along one axis; needs no running world."""
    return case.axis_rank(name, rank)


@lru_cache(maxsize=2**14)
def coordinates(case: Case, rank: int) -> Mapping[str, tuple[int, int]]:
    """Axis -> (place of a global rank on it, ranks on it); needs no running world."""
    return {name: (axis_rank(case, name, rank), axis_size(case, name)) for name in case.axis_sizes}
