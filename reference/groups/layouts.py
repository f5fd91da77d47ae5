"""A layout: the rank orders that one system lays over the same ranks, one for each kind of weights."""

from __future__ import annotations

from dataclasses import dataclass

from reference.errors import CaseError
from reference.groups.orders import Groups, RankOrder

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Rank orders over the same ranks: of dense weights, then those of experts or of gathered weights.

    An axis that several orders have, such as pp, has the same groups in each.
    """

    orders: tuple[RankOrder, ...]

    @property
    def world(self) -> int:
        """Ranks, the same for each order."""
        return self.orders[0].world

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size, for the axes of all orders."""
        return {axis: size for order in self.orders for axis, size in order.axes}

    def groups(self, axes: str) -> Groups:
        """All groups along axes of one order, such as "tp", "dp-cp" or "etp-ep"; groups and members ascend.

        Raises CaseError when no order has all these axes.
        """
        return self._order(axes).groups(axes)

    def group(self, axes: str, rank: int) -> tuple[int, ...]:
        """The group of a rank along axes of one order. Raises CaseError as `groups`, and for an unknown rank."""
        return self._order(axes).group(axes, rank)

    def source(self, axes: str, rank: int) -> int:
        """The global rank that broadcasts to this rank along these axes: the first of its group.

        Megatron-Core: get_tensor_model_parallel_src_rank ("tp"), get_model_parallel_src_rank ("tp-pp"),
        get_data_parallel_src_rank ("dp", with context "dp-cp"). Raises CaseError as `group`.
        """
        return self.group(axes, rank)[0]

    def lists(self) -> dict[str, Groups]:
        """Axis -> its groups, for the axes of all orders."""
        return {axis: groups for order in self.orders for axis, groups in order.lists().items()}

    def place(self, axis: str, rank: int) -> int:
        """The place of a rank in its group along one axis. Raises KeyError for an unknown axis."""
        return next((order for order in self.orders if axis in order.sizes), self.orders[0]).place(axis, rank)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> the place of a rank on it, for the axes of all orders. Raises CaseError for an unknown rank."""
        return {axis: place for order in self.orders for axis, place in order.coordinates(rank).items()}

    def _order(self, axes: str) -> RankOrder:
        words = set(axes.split("-"))
        for order in self.orders:
            if words <= set(order.sizes):
                return order
        legal = " or of ".join("-".join(order.sizes) for order in self.orders)
        raise CaseError("group", axes, "its axes must stand in one rank order", f"axes of {legal}")
