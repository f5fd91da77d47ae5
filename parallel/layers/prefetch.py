"""Gathered weights of the blocks: which linear starts a gather, when, and for how long its result is held.

The table says which linear starts the gather of what. `ahead` is the case's overlap. To gather a block is to gather all
its linears at once: in one call a tensor, or when fused in one flat call.

    ahead fused recompute=full | forward              | recompute    | backward
    no    no    no             | each: itself         | -            | each: itself
    no    no    yes            | each: itself         | each: itself | each: itself
    yes   no    no             | `wo`: the next block | -            | each: the linear before it, across blocks too
    yes   no    yes            | `wo`: the next block | nothing      | the last: the block before
    no    yes   any            | the first: its block | nothing      | the last: its block
    yes   yes   any            | `wo`: the next block | nothing      | the last: the block before

With `ahead` no block comes before the first one in forward, so its first linear gathers it. No block comes before the
last one in backward, so its last linear gathers itself or its block. On a pipeline these are the blocks of one stage.
A recompute that starts nothing shares the gather of backward, which begins at the last linear, before the block runs
again. A result is dropped with its last use, and no graph holds it. Source: InternEvo `core/parallel/comm/isp.py`
(modes.md 3.6): prefetch before `wo`, module by module in backward, `layer_fuse_isp_comm`. There recomputed blocks
prefetch the block before and keep their weights, and all chunks of a pipeline rank share one ISPOverlapState.
"""

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardproof.parallel.communication.collectives import (
    Pending,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
)
from shardproof.parallel.communication.layout import Axis


class FlatGather:
    """An all-gather of many shards, started when this is made; `tensors` may be called any number of times."""

    def __init__(self, shards: Sequence[Tensor], axis: Axis, *, overlap: bool) -> None:
        self._shapes = [shard.shape for shard in shards]
        self._ranks = axis.size
        flat = torch.cat([shard.detach().flatten() for shard in shards])
        self._pending = start_all_gather(flat, axis, dim=0, overlap=overlap)
        self._rows: tuple[Tensor, ...] | None = None

    def tensors(self, first: int, count: int) -> list[Tensor]:
        """`count` full tensors from number `first` on, copied, so that none of them keeps the buffer alive."""
        if self._rows is None:
            buffer = self._pending.wait().view(self._ranks, -1)
            self._rows = buffer.split([shape.numel() for shape in self._shapes], 1)
        chosen = zip(self._rows[first : first + count], self._shapes[first : first + count], strict=True)
        return [part.clone().view(self._ranks * shape[0], *shape[1:]) for part, shape in chosen]


def reduce_scatter_flat(fulls: Sequence[Tensor], axis: Axis) -> list[Tensor]:
    """This rank's shard along dim 0 of the sum over the axis of every tensor, in one reduce-scatter."""
    buffer = torch.cat([full.reshape(axis.size, -1) for full in fulls], 1)
    own = reduce_scatter(buffer.flatten(), axis, dim=0)
    parts = own.split([full.numel() // axis.size for full in fulls])
    return [part.view(full.shape[0] // axis.size, *full.shape[1:]) for part, full in zip(parts, fulls, strict=True)]


_PREFETCHING = "wo"
"""The linear that starts the next block: the products of the MLP come after it and hide the gathers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPlan:
    """The first columns of the table above; `again` are the recomputed blocks."""

    ahead: bool
    fused: bool
    again: Container[int]

    def by_block(self, block: int) -> bool:
        """Whether this block is gathered as a whole in backward."""
        return self.fused or (self.ahead and block in self.again)


@dataclass(slots=True)
class _Loan:
    """The full tensors of a linear, gathered or on their way, to be used `uses` more times."""

    arrive: Callable[[], list[Tensor]]
    uses: int

    def take(self) -> list[Tensor]:
        """The full tensors; the first use waits for them."""
        tensors = self.arrive()
        self.uses -= 1
        self.arrive = lambda: tensors
        return tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of a linear among the linears of all blocks. `shards` are its weight and any bias, split on dim 0."""

    gathers: "Gathers"
    number: int
    block: int
    leaf: str
    shards: tuple[Tensor, ...]

    def edges(self) -> tuple[Tensor, ...]:
        """The leaves of the linear's product in the graph: its shards or, fused, its part of the gathered block."""
        return self.gathers.edges(self)

    def forward(self, edges: Sequence[Tensor]) -> list[Tensor]:
        """The full tensors for the product, in forward and in recompute."""
        self.gathers.prefetch(self)
        return list(edges) if self.gathers.plan.fused else self.gathers.forward(self)

    def look_back(self) -> AbstractContextManager[None]:
        """A context for the first access to what the product saved: a checkpointed block runs again there."""
        return self.gathers.look_back(self)

    def backward(self) -> Callable[[], list[Tensor]]:
        """Start the gather for backward; the returned function waits for the full tensors."""
        return self.gathers.backward(self)

    def reduce(self, full: Tensor) -> Pending:
        """Start turning the gradient of a full tensor into that of the leaf: its shard of the sum, or unchanged when
        fused.
        """
        if self.gathers.plan.fused:
            return Pending(None, lambda: full)
        return start_reduce_scatter(full, self.gathers.axis, dim=0)


class _BlockGather(torch.autograd.Function):
    """All shards of a block -> all its full tensors; the gradients go back in one reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, gathers: "Gathers", seats: Sequence[Seat], *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.axis = gathers.axis
        return tuple(full for seat in seats for full in gathers.forward(seat))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *reduce_scatter_flat(grads, ctx.axis)


class Gathers:
    """The gathers of one stage's blocks over one axis on one rank.

    Linears take their seats in forward order, while being built.
    """

    def __init__(self, axis: Axis, plan: PrefetchPlan) -> None:
        self.axis, self.plan = axis, plan
        self._seats: list[Seat] = []
        self._blocks: dict[int, list[Seat]] = {}
        self._loans: dict[int, _Loan] = {}
        self._edges: dict[int, tuple[Tensor, ...]] = {}
        self._recomputing = False

    def seat(self, block: int, leaf: str, shards: Sequence[Tensor]) -> Seat:
        """The seat of the next linear in forward order; it belongs to this block."""
        seat = Seat(gathers=self, number=len(self._seats), block=block, leaf=leaf, shards=tuple(shards))
        self._seats.append(seat)
        self._blocks.setdefault(block, []).append(seat)
        return seat

    @property
    def idle(self) -> bool:
        """Whether nothing is gathered or under way, as between micro-batches."""
        return not self._loans and not self._edges

    def edges(self, seat: Seat) -> tuple[Tensor, ...]:
        """See `Seat.edges`: the first linear of a fused block makes the node for all of them."""
        if not self.plan.fused:
            return seat.shards
        seats = self._blocks[seat.block]
        if seat is seats[0]:
            fulls = iter(_BlockGather.apply(self, seats, *(shard for each in seats for shard in each.shards)))
            self._edges |= {each.number: tuple(next(fulls) for _ in each.shards) for each in seats}
        return self._edges.pop(seat.number)

    def forward(self, seat: Seat) -> list[Tensor]:
        """The full tensors of a seat in forward or recompute, gathered now unless that was started before."""
        if seat.number not in self._loans:
            self._start(self._blocks[seat.block] if self.plan.ahead or self.plan.fused else [seat])
        return self._take(seat)

    def prefetch(self, seat: Seat) -> None:
        """In forward, start what comes after this seat; a recompute starts nothing."""
        if self.plan.ahead and seat.leaf == _PREFETCHING and not self._recomputing:
            self._start(self._blocks.get(seat.block + 1, []))

    @contextmanager
    def look_back(self, seat: Seat) -> Iterator[None]:
        """See `Seat.look_back`. The gathers start before the block runs again, so that both passes can use them."""
        if self.plan.by_block(seat.block) and self._is_last(seat) and seat.number not in self._loans:
            self._start(self._blocks[seat.block], again=True)
        self._recomputing = True
        try:
            yield
        finally:
            self._recomputing = False

    def backward(self, seat: Seat) -> Callable[[], list[Tensor]]:
        """See `Seat.backward`; this starts what comes before the seat too."""
        if seat.number not in self._loans:
            self._start([seat])
        if self.plan.ahead and self._is_last(seat) and self.plan.by_block(seat.block - 1):
            self._start(self._blocks.get(seat.block - 1, []), again=True)
        before = self._seats[max(seat.number - 1, 0) : seat.number]
        if self.plan.ahead and before and not self.plan.by_block(before[0].block):
            self._start(before)
        return lambda: self._take(seat)

    def _is_last(self, seat: Seat) -> bool:
        return seat is self._blocks[seat.block][-1]

    def _start(self, seats: Sequence[Seat], *, again: bool = False) -> None:
        """Issue the gathers of these seats, in the same order on every rank. `again`: a recompute will use them too."""
        uses = 2 if again and seats and seats[0].block in self.plan.again else 1
        if not self.plan.fused:
            for seat in seats:
                pending = [start_all_gather(x.detach(), self.axis, dim=0, overlap=self.plan.ahead) for x in seat.shards]
                self._loans[seat.number] = _Loan(partial(_wait_all, pending), uses)
        elif seats:
            flat = FlatGather([x for seat in seats for x in seat.shards], self.axis, overlap=self.plan.ahead)
            ends = itertools.accumulate(len(seat.shards) for seat in seats)
            for seat, end in zip(seats, ends, strict=True):
                count = len(seat.shards)
                self._loans[seat.number] = _Loan(partial(flat.tensors, end - count, count), uses)

    def _take(self, seat: Seat) -> list[Tensor]:
        """Return a seat's full tensors, and forget them after their last use."""
        loan = self._loans[seat.number]
        tensors = loan.take()
        if loan.uses == 0:
            del self._loans[seat.number]
        return tensors


def _wait_all(pending: Sequence[Pending]) -> list[Tensor]:
    return [one.wait() for one in pending]
