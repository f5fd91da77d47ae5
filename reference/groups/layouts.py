"""A layout: the rank orders that one system lays over the same ranks, one for each kind of weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from reference.errors import CaseError
from reference.groups.orders import Groups, RankOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Rank orders over the same ranks: of dense weights, then those of experts or of gathered weights.

    An axis that several orders have, such as pp, has the same groups in each. `joined` names axes of one order as one
    axis: {"dp_cp": "dp-cp"} are the ranks that differ only in their places on dp and cp.
    """

    orders: tuple[RankOrder, ...]
    joined: Mapping[str, str] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Ranks, the same for each order."""
        return self.orders[0].world

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size, for the axes of all orders and the joined ones."""
        sizes = {axis: size for order in self.orders for axis, size in order.axes}
        return sizes | {name: math.prod(sizes[axis] for axis in axes.split("-")) for name, axes in self.joined.items()}

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
        """Axis -> its groups, for the axes of all orders and the joined ones."""
        lists = {axis: groups for order in self.orders for axis, groups in order.lists().items()}
        return lists | {name: self.groups(axes) for name, axes in self.joined.items()}

    def place(self, axis: str, rank: int) -> int:
        """The place of a rank in its group along one axis. Raises KeyError for an unknown axis."""
        if axis in self.joined:
            return self.group(self.joined[axis], rank).index(rank)
        return next((order for order in self.orders if axis in order.sizes), self.orders[0]).place(axis, rank)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> the place of a rank on it, as in `lists`. Raises CaseError for an unknown rank."""
        places = {axis: place for order in self.orders for axis, place in order.coordinates(rank).items()}
        return places | {name: self.place(name, rank) for name in self.joined}

    def _order(self, axes: str) -> RankOrder:
        words = set(axes.split("-"))
        for order in self.orders:
            if words <= set(order.sizes):
                return order
        legal = " or of ".join("-".join(order.sizes) for order in self.orders)
        raise CaseError("group", axes, "its axes must stand in one rank order", f"axes of {legal}")
