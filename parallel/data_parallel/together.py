"""Buffers of parameters whose copies lie on different ranks, as one: experts' and all others'."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from parallel.data_parallel.buffers import Buckets
from parallel.model.strategy import Rank

_Held = TypeVar("_Held")


class Together:
    """`buckets` are the buffers by the mesh axis over which their parameters have copies."""

    def __init__(self, buckets: Mapping[str, Buckets]) -> None:
        self._buckets = buckets

    def prepare(self, rank: Rank) -> Rank:
        """Each lays out its parameters, and has the optimizer step what it shall."""
        made = {axis: buckets.prepare(rank.of(axis)) for axis, buckets in self._buckets.items()}

        def merged(part: Callable[[Rank], Mapping[str, _Held]]) -> dict[str, _Held]:
            return {name: part(made[rank.case.data_axis_of(name)])[name] for name in rank.parameters}

        return replace(
            rank,
            parameters=merged(lambda one: one.parameters),
            places=merged(lambda one: one.places),
            updated=merged(lambda one: one.updated),
            updated_places=merged(lambda one: one.updated_places),
        )

    def reduce(self, rank: Rank) -> None:
        """The sums over the ranks with copies are complete."""
        for axis, buckets in self._buckets.items():
            buckets.reduce(rank.of(axis))

    def gradients(self) -> Mapping[str, Tensor]:
        """Every parameter's place in its buffer."""
        return {name: place for buckets in self._buckets.values() for name, place in buckets.gradients().items()}

    def hand_over(self, rank: Rank) -> None:
        """Give the optimizer's tensors their gradients, in their dtype."""
        for axis, buckets in self._buckets.items():
            buckets.hand_over(rank.of(axis))

    def afterwards(self, rank: Rank) -> None:
        """Round masters into the parameters, and gather what ranks share."""
        for axis, buckets in self._buckets.items():
            buckets.afterwards(rank.of(axis))
