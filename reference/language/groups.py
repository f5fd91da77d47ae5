"""Groups of ranks: rank orders, a layout of several over the same ranks, a pipeline. No torch is loaded.

A rank order numbers ranks by the axes of a mesh, the fastest axis first.

    rank = sum over axes of (place on the axis) * (product of the sizes of all faster axes)

A group along some axes holds the ranks that differ only in their places on these. Axes are joined by `-`: "dp-cp". The
order of the words does not matter: the members of a group and the groups themselves always ascend.

Source: Megatron-Core `parallel_state.py`: RankGenerator, generate_masked_orthogonal_rank_groups.

A layout is the rank orders that one system lays over the same ranks, one for each kind of weights.

A pipeline is the ranks of one pp group in order, with the model chunks of each. With v chunks a rank, chunk k of stage
r is virtual stage k*P + r of P*v: chunk after chunk around the ranks. Sources: Megatron-Core `parallel_state.py`
(default_embedding_ranks), `transformer_layer.py`: get_transformer_layer_offset.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from shardproof.reference.errors import CaseError

Groups: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RankOrder:
    """Ranks 0 .. world-1 of a mesh. `axes` are (name, size), the fastest first; sizes count ranks."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, order: str, sizes: Mapping[str, int]) -> "RankOrder":
        """The mesh of an order string such as "tp-cp-dp-pp", in upper or lower case.

        An axis of size 1 may be left out of the order. Raises CaseError for an unknown or repeated word, for an axis of
        several ranks that is left out, and for a size that is no whole number of at least 1.
        """
        for axis, size in sizes.items():
            check_size(axis, size)
        words, whole = order.lower().split("-"), "-".join(sizes)
        for word in words:
            if word not in sizes:
                raise CaseError("order", order, f"{word!r} is not an axis", f"order={whole}")
            if words.count(word) > 1:
                raise CaseError("order", order, f"names {word} twice", f"order={'-'.join(dict.fromkeys(words))}")
        absent = [axis for axis in sizes if axis not in words]
        for axis in absent:
            if sizes[axis] > 1:
                rule = f"must name {axis}, whose size is {sizes[axis]}"
                raise CaseError("order", order, rule, f"order={'-'.join([*words, *absent])}")
        return cls(tuple((axis, sizes[axis]) for axis in [*words, *absent]))

    @property
    def world(self) -> int:
        """Ranks of the mesh."""
        return math.prod(size for _, size in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size, fastest first."""
        return dict(self.axes)

    def groups(self, axes: str) -> Groups:
        """All groups along these axes. Raises CaseError for a word that is not an axis."""
        inside, outside = self._split_axes(axes)
        return _groups(tuple(inside), tuple(outside))

    def group(self, axes: str, rank: int) -> tuple[int, ...]:
        """The group of a rank along these axes. Raises CaseError for an unknown axis and an unknown rank."""
        self._check_rank(rank)
        inside, _ = self._split_axes(axes)
        first = rank - sum(rank // stride % size * stride for size, stride in inside)
        return tuple(first + offset for offset in _sums(inside))

    def lists(self) -> dict[str, Groups]:
        """Axis -> its groups."""
        return {axis: self.groups(axis) for axis, _ in self.axes}

    def place(self, axis: str, rank: int) -> int:
        """The place of a rank in its group along one axis. Raises KeyError for an unknown axis."""
        for name, size, stride in self._strides():
            if name == axis:
                return rank // stride % size
        raise KeyError(axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> the place of a rank on it. Raises CaseError for a rank outside the mesh."""
        self._check_rank(rank)
        return {axis: rank // stride % size for axis, size, stride in self._strides()}

    def divide(self, axis: str, **parts: int) -> "RankOrder":
        """The order of the same ranks with one axis divided into levels of these sizes, the fastest first.

        Raises CaseError for an unknown axis, and if the product of the sizes is not that of the axis.
        """
        sizes = self.sizes
        if axis not in sizes:
            raise CaseError("axis", axis, "is not an axis of this mesh", " ".join(sizes))
        if math.prod(parts.values()) != sizes[axis]:
            written = "x".join(map(str, parts.values()))
            raise CaseError(axis, sizes[axis], f"cannot be divided into {written}", "sizes that multiply to it")
        return RankOrder(tuple(one for old in self.axes for one in (parts.items() if old[0] == axis else (old,))))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise CaseError("rank", rank, f"must be one of {self.world} ranks", f"0..{self.world - 1}")

    def _strides(self) -> Iterator[tuple[str, int, int]]:
        """Axis, size and stride of each axis, fastest first."""
        stride = 1
        for axis, size in self.axes:
            yield axis, size, stride
            stride *= size

    def _split_axes(self, axes: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Size and stride of the axes that these words name, and of all others."""
        words = set(axes.split("-"))
        for word in sorted(words - set(self.sizes)):
            raise CaseError("group", axes, f"{word!r} is not an axis of this mesh", "-".join(self.sizes))
        inside = [(size, stride) for axis, size, stride in self._strides() if axis in words]
        return inside, [(size, stride) for axis, size, stride in self._strides() if axis not in words]


def check_size(field: str, size: object) -> None:
    """Raise CaseError unless a size is a whole number of at least 1."""
    if type(size) is not int or size < 1:
        raise CaseError(field, size, "must be a whole number of at least 1", f"{field}=1")


@functools.lru_cache(maxsize=32)
def _groups(inside: tuple[tuple[int, int], ...], outside: tuple[tuple[int, int], ...]) -> Groups:
    """The groups over axes of (size, stride). Kept, since each term of a case names axes, and a world may be large."""
    offsets = _sums(inside)
    return tuple(tuple([first + offset for offset in offsets]) for first in _sums(outside))


def _sums(axes: Iterable[tuple[int, int]]) -> list[int]:
    """The sum of place * stride for all places on axes of (size, stride), the first axis fastest."""
    sums = [0]
    for size, stride in axes:
        sums = [place * stride + faster for place in range(size) for faster in sums]
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Rank orders over the same ranks: of dense weights, then of experts or of gathered weights.

    An axis that several orders have, such as pp, has the same groups in each. `joined` names axes of one order as one
    axis: {"dp_cp": "dp-cp"} are the ranks that differ only in their places on dp and cp.
    """

    orders: tuple[RankOrder, ...]
    joined: Mapping[str, str] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """The number of ranks, the same for each order."""
        return self.orders[0].world

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size, for the axes of all orders and the joined ones."""
        sizes = {axis: size for order in self.orders for axis, size in order.axes}
        return sizes | {name: math.prod(sizes[axis] for axis in axes.split("-")) for name, axes in self.joined.items()}

    def groups(self, axes: str) -> Groups:
        """All groups along axes of one order, such as "tp", "dp-cp" or "etp-ep"; groups and members ascend.

        Raises CaseError if no order has all these axes.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineGroup:
    """A pipeline: `ranks` are global ranks, stage by stage; each holds `chunks` chunks of the model.

    Raises CaseError for no ranks, and for more than one chunk on a single stage.
    """

    ranks: tuple[int, ...]
    chunks: int = 1

    def __post_init__(self) -> None:
        check_size("pp", len(self.ranks))
        check_size("chunks", self.chunks)
        if self.chunks > 1 and len(self.ranks) == 1:
            raise CaseError("chunks", self.chunks, "more than one chunk needs pp of at least 2", "chunks=1")

    def stage(self, rank: int) -> int:
        """The stage of a global rank, 0 for the first. Raises CaseError for a rank outside this pipeline."""
        if rank not in self.ranks:
            raise CaseError("rank", rank, "is not in this pipeline", " ".join(map(str, self.ranks)))
        return self.ranks.index(rank)

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """The place of a chunk in the whole model. Raises CaseError for an unknown rank or chunk."""
        if not 0 <= chunk < self.chunks:
            raise CaseError("chunk", chunk, f"must be one of {self.chunks} chunks", f"0..{self.chunks - 1}")
        return chunk * len(self.ranks) + self.stage(rank)

    def layers(
        self, count: int, rank: int, chunk: int = 0, *, first: int | None = None, last: int | None = None
    ) -> range:
        """The numbers of the layers, of `count` in all, that a chunk of a rank holds.

        `first` and `last` are the numbers of layers of the first and the last stage over all their chunks; the other
        stages share the rest equally. Raises CaseError if the layers cannot be shared like that.
        """
        counts = self._layer_counts(count, first, last)
        stage = self.virtual_stage(rank, chunk) % len(self.ranks)
        start = (chunk * count + sum(counts[:stage])) // self.chunks
        return range(start, start + counts[stage] // self.chunks)

    def embedding_ranks(self) -> tuple[int, ...]:
        """The ranks that hold a tied word embedding, the first and the last stage: its gradient is summed over them."""
        return tuple(sorted({self.ranks[0], self.ranks[-1]}))

    def _layer_counts(self, count: int, first: int | None, last: int | None) -> list[int]:
        """The layers of each stage, over all its chunks."""
        stages, chunks = len(self.ranks), self.chunks
        given = {"first_layers": first, "last_layers": last}
        for key, layers in given.items():
            if layers is None:
                continue
            check_size(key, layers)
            if stages == 1:
                raise CaseError(key, layers, "needs pp of at least 2", "pp=2")
            if layers % chunks:
                raise CaseError(key, layers, f"must be a multiple of chunks={chunks}", f"{key}={chunks}")
        ends, others = (
            sum(layers or 0 for layers in given.values()),
            stages - len(given) + [*given.values()].count(None),
        )
        unit = others * chunks
        if (count - ends) % unit if unit and count >= ends else count != ends:
            of_chunks = f" of {chunks} chunks" if chunks > 1 else ""
            rule = f"must share evenly over {stages} stages{of_chunks}, unless first_layers= or last_layers= is given"
            if ends:
                rule = f"must leave first_layers + last_layers = {ends} and a multiple of {unit}"
            raise CaseError("layers", count, rule, f"layers={ends + max((count - ends) // (unit or 1), 1) * unit}")
        middle = (count - ends) // max(others, 1)
        counts = [middle] * stages
        if first is not None:
            counts[0] = first
        if last is not None:
            counts[-1] = last
        return counts
