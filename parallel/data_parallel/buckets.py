"""Gradients in flat buckets: each rank gets their sum over the data ranks (zero=0), or its own part of it (zero=1).

Backward adds every gradient to its place in a buffer, in the buffer's dtype. The buffer is cut into buckets, and the
gradients of a bucket are summed in one collective. With `bucket=` the sum starts in the backward of the last
micro-batch, as soon as the bucket's last gradient has come. Otherwise there is one bucket, summed after that backward.
No micro-batch before the last communicates (no_sync).

    zero=0   all_reduce of the bucket; the optimizer steps whole parameters
    zero=1   reduce_scatter of the padded bucket; the optimizer steps this rank's part of every bucket;
             all_gather of the updated parts into the parameters

Parameters lie end to end in reverse order of registration, roughly the order in which backward completes gradients.
With zero=1 each starts at a multiple of ALIGNMENT elements, and a bucket is padded to a multiple of lcm(ranks,
DIVISOR). The padding travels too, and belongs to no parameter. The parts of ranks are equal, and may cut through
parameters:

    rank r of n owns elements [start + r*B/n, start + (r+1)*B/n) of a bucket of B elements

With `wgrad=fused` a linear adds the gradient of its weight to the buffer itself. With `wgrad=deferred` these
gradients are computed after the last backward of the step, in the order of backward, before any sum that needs them.
Autograd gets a placeholder instead: nan, which is never read, or 0 for a tied table, to which the embedding's gradient
is added.

With `master=float32` the optimizer steps float32 copies, which are rounded into the parameters after its step.

Sources: Megatron-Core 0.16.1 `_ParamAndGradBuffer`, `DistributedOptimizer._build_model_gbuf_range` (around.md 15.1,
15.2); arXiv:1910.02054 for ZeRO.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor

from shardproof.parallel.communication import expectation
from shardproof.parallel.communication.collectives import Pending, all_gather, start_all_reduce, start_reduce_scatter
from shardproof.parallel.communication.layout import Cut, Placement
from shardproof.parallel.communication.schedules import TABLE, Stage
from shardproof.parallel.layers.linear import set_holder
from shardproof.parallel.layers.roles import is_column, is_row
from shardproof.parallel.model.strategy import Rank
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of

ALIGNMENT = 64
"""In a sharded bucket every parameter starts at a multiple of this many elements."""
DIVISOR = 128
"""The size of a sharded bucket is a multiple of this and of the number of ranks."""


def gradient_dtype(case: Case) -> torch.dtype:
    """The dtype in which gradients are added up and summed over ranks."""
    dtype: torch.dtype = getattr(torch, expectation.gradient_dtype(case))
    return dtype


def trained_dtype(case: Case) -> torch.dtype:
    """The dtype of the tensors that the optimizer steps."""
    return torch.float32 if case.master == "float32" else dtype_of(case)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """The place of one flattened parameter in the buffer: elements [start, end)."""

    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Elements [start, end) of the buffer, padding included, and the places of their parameters, in this order."""

    start: int
    end: int
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Elements that travel, padding included."""
        return self.end - self.start

    def owned_range(self, rank: int, ranks: int) -> range:
        """The elements of the buffer that a rank owns. Raises ValueError when the bucket has no equal parts."""
        if self.size % ranks:
            raise ValueError(
                f"ranks={ranks}: must divide the {self.size} elements of the bucket; legal: sharded buckets"
            )
        width = self.size // ranks
        return range(self.start + rank * width, self.start + (rank + 1) * width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The elements [first, last) of a flattened parameter that a rank owns, and the place of the first one in the
    rank's part of the bucket (`at`).
    """

    name: str
    first: int
    last: int
    at: int


def make_buckets(
    sizes: Mapping[str, int], *, ranks: int, sharded: bool, largest: int = 0, apart: Collection[str] = ()
) -> tuple[Bucket, ...]:
    """The buckets for parameters, given as name -> elements in order of registration.

    A bucket is closed once it holds `largest` elements; with 0 there is only one bucket. If buckets are sharded, each
    parameter of `apart` gets a bucket of its own. An embedding that two pipeline stages share needs this, so that both
    stages shard it alike.
    """
    unit, divisor = (ALIGNMENT, math.lcm(ranks, DIVISOR)) if sharded else (1, 1)
    found: list[Bucket] = []
    slots: list[Slot] = []
    first = end = 0

    def close(at: int) -> int:
        bucket = Bucket(start=first, end=_ceil(at, divisor), slots=tuple(slots))
        found.append(bucket)
        slots.clear()
        return bucket.end

    for name in reversed([*sizes]):
        start = _ceil(end, unit)
        alone = sharded and name in apart
        if alone and slots:
            first = start = close(start)
        end = start + sizes[name]
        slots.append(Slot(name=name, start=start, end=end))
        if alone or 0 < largest <= end - first:
            first = end = close(end)
    if slots:
        close(end)
    return tuple(found)


def shares_of_rank(bucket: Bucket, rank: int, ranks: int) -> Iterator[Share]:
    """The parts of parameters that this rank owns in a bucket, in the order of the buffer."""
    owned = bucket.owned_range(rank, ranks)
    for slot in bucket.slots:
        first, last = max(slot.start, owned.start), min(slot.end, owned.stop)
        if first < last:
            yield Share(name=slot.name, first=first - slot.start, last=last - slot.start, at=first - owned.start)


def _ceil(size: int, unit: int) -> int:
    return -(-size // unit) * unit


_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class _Under:
    """A bucket of this rank, the number of its gradients that are complete in this step, and its sum over ranks, once
    that has started.
    """

    bucket: Bucket
    flat: Tensor
    arrived: int = 0
    pending: Pending | None = None


def _weak_hook(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A hook that calls `method(name, ...)`. It holds the method weakly, since Python cannot free a cycle through
    autograd.
    """
    known: WeakMethod[Callable[..., Any]] = WeakMethod(method)

    def call(*args: Tensor) -> Any:
        found = known()
        assert found is not None  # the buffer lives as long as its rank trains
        return found(name, *args)

    return call


class Buckets:
    """The buffer of one rank: `prepare` it, then call `reduce`, `hand_over` and `afterwards` in every step.

    `apart`: the data axis of its parameters if that differs from `Core.data_axis` (edp for experts).
    """

    def __init__(self, case: Case, apart: str = "") -> None:
        self._apart = apart
        self._case, self._sharded = case, case.zero == 1
        self._under: list[_Under] = []
        self._views: dict[str, Tensor] = {}
        self._of: dict[str, _Under] = {}
        self._came: dict[str, int] = {}
        self._begun: set[str] = set()
        self._later: list[tuple[str, Tensor, Tensor]] = []
        self._own: dict[str, range] = {}

    def prepare(self, rank: Rank) -> Rank:
        """Lay out the buffer, hook all gradients, choose the tensors to step."""
        case, self._axis, self._model = self._case, rank.mesh.axis(rank.case.data_axis), rank.parameters
        if self._apart:
            self._axis = rank.mesh.axis(self._apart)
        self.lay_out(rank)
        for name, parameter in rank.parameters.items():
            self._came[name] = 0
            if accumulates_in_buffer(case, name):
                set_holder(parameter, _weak_hook(self._take_over, name))
            parameter.register_post_accumulate_grad_hook(_weak_hook(self._on_gradient, name))
        return self._prepare_split(rank) if self._sharded else self._prepare_whole(rank)

    def lay_out(self, rank: Rank) -> None:
        """Make the buffer of every chunk, with nothing in it."""
        self._under.clear()
        for stage, _ in rank.chunks:
            sizes = {name: rank.parameters[name].numel() for name in rank.places if stage.holds(name)}
            found = stage_buckets(self._case, stage, sizes, self._axis.size)
            flat = torch.zeros(found[-1].end if found else 0, dtype=gradient_dtype(self._case), device=rank.device)
            for bucket in found:
                self._under.append(_Under(bucket=bucket, flat=flat))
                for slot in bucket.slots:
                    self._views[slot.name] = flat[slot.start : slot.end].view(rank.parameters[slot.name].shape)
                    self._of[slot.name] = self._under[-1]

    def _prepare_whole(self, rank: Rank) -> Rank:
        if self._case.master == "none":
            return rank
        masters = {name: _trained_leaf(parameter, self._case) for name, parameter in rank.parameters.items()}
        return replace(rank, parameters=masters, updated=masters)

    def _prepare_split(self, rank: Rank) -> Rank:
        """Let the optimizer step this rank's part of every bucket: a range of each flat parameter."""
        ranges_by_name: dict[str, list[range]] = {name: [range(0)] * self._axis.size for name in rank.parameters}
        for under in self._under:
            for index in range(self._axis.size):
                for share in shares_of_rank(under.bucket, index, self._axis.size):
                    ranges_by_name[share.name][index] = range(share.first, share.last)
        self._own = {name: ranges[self._axis.rank] for name, ranges in ranges_by_name.items()}
        updated = {
            name: _trained_leaf(_part(rank.parameters[name], own), self._case) for name, own in self._own.items()
        }
        places: dict[str, Placement] = {}
        for name, place in rank.places.items():
            cut = Cut(axis=self._axis.name, dim=None, held=tuple((own,) for own in ranges_by_name[name]))
            places[name] = replace(place, cuts=(*place.cuts, cut))
        rank = replace(rank, updated=updated, updated_places=places)
        return rank if self._case.master == "none" else replace(rank, parameters=updated, places=places)

    def _on_gradient(self, name: str, parameter: Tensor) -> None:
        """Take a parameter's gradient of one micro-batch into the buffer; start the bucket's sum after the last one."""
        assert parameter.grad is not None
        taken = accumulates_in_buffer(self._case, name)
        if not taken or name == TABLE:
            if name in self._begun:
                self._views[name].add_(parameter.grad)
            else:
                self._views[name].copy_(parameter.grad)
            self._begun.add(name)
        parameter.grad = None
        self._came[name] += 1
        if self._came[name] == self._case.micro and not (taken and self._case.wgrad == "deferred"):
            under = self._of[name]
            under.arrived += 1
            if self._case.bucket and under.arrived == len(under.bucket.slots):
                self._start(under)

    def _take_over(self, name: str, grad: Tensor, x: Tensor) -> Tensor:
        """Add grad^T x to a weight's gradient, now or later. Returns what autograd gets instead: nan, or 0 for a tied
        table.
        """
        if self._case.wgrad == "fused":
            self._multiply(name, grad, x)
        else:
            self._later.append((name, grad, x))
        return torch.full_like(self._model[name], 0.0 if name == TABLE else torch.nan)

    def _multiply(self, name: str, grad: Tensor, x: Tensor) -> None:
        view, begun = self._views[name], name in self._begun
        torch.addmm(view, grad.t().to(view.dtype), x.to(view.dtype), beta=float(begun), out=view)
        self._begun.add(name)

    def _start(self, under: _Under) -> None:
        buffer = under.flat[under.bucket.start : under.bucket.end]
        overlap = self._case.overlap and self._case.bucket > 0
        if self._sharded:
            under.pending = start_reduce_scatter(buffer, self._axis, dim=0, overlap=overlap)
        else:
            under.pending = start_all_reduce(buffer, self._axis, overlap=overlap)

    def reduce(self, _rank: Rank) -> None:
        """Complete the sums over the data ranks; with zero=1 only this rank's part of every bucket is summed."""
        for deferred in self._later:
            self._multiply(*deferred)
        self._later.clear()
        for under in self._under:
            if under.pending is None:
                self._start(under)
        for under in self._under:
            assert under.pending is not None
            summed, under.pending, under.arrived = under.pending.wait(), None, 0
            if self._sharded:
                own = under.bucket.owned_range(self._axis.rank, self._axis.size)
                under.flat[own.start : own.stop].copy_(summed)
        self._came = dict.fromkeys(self._came, 0)
        self._begun.clear()

    def gradients(self) -> Mapping[str, Tensor]:
        """Every parameter's place in the buffer; with zero=1 only this rank's part of it is summed."""
        return self._views

    def hand_over(self, rank: Rank) -> None:
        """Give the optimizer's tensors their gradients, in their dtype."""
        for name, tensor in rank.updated.items():
            gradient = _part(self._views[name], self._own[name]) if self._sharded else self._views[name]
            tensor.grad = gradient.to(tensor.dtype)

    def afterwards(self, rank: Rank) -> None:
        """Round masters into the parameters; with zero=1 gather every rank's part into them."""
        with torch.no_grad():
            for name, tensor in rank.updated.items() if self._case.master != "none" else ():
                own = _part(self._model[name], self._own[name]) if self._sharded else self._model[name]
                own.copy_(tensor)
            for under in self._under if self._sharded else ():
                self._gather(under.bucket)

    def _gather(self, bucket: Bucket) -> None:
        """Gather every rank's part of a bucket into the parameters."""
        first = next(iter(self._model.values()))
        part = first.new_zeros(bucket.size // self._axis.size)
        for share in shares_of_rank(bucket, self._axis.rank, self._axis.size):
            own = range(share.first, share.last)
            part[share.at : share.at + len(own)].copy_(_part(self._model[share.name], own))
        whole = all_gather(part, self._axis, dim=0)
        for slot in bucket.slots:
            flat = whole[slot.start - bucket.start : slot.end - bucket.start]
            self._model[slot.name].copy_(flat.view_as(self._model[slot.name]))


def _part(tensor: Tensor, elements: range) -> Tensor:
    """A range of elements of a tensor, as a flat view."""
    return tensor.detach().view(-1)[elements.start : elements.stop]


def _trained_leaf(tensor: Tensor, case: Case) -> Tensor:
    """The tensor that the optimizer steps for this parameter: the parameter itself, or a float32 copy."""
    return tensor.detach().to(trained_dtype(case)).requires_grad_()


def stage_buckets(case: Case, stage: Stage, sizes: Mapping[str, int], ranks: int) -> tuple[Bucket, ...]:
    """The buckets of a stage's parameters, given as name -> elements. Each chunk of a rank has a buffer of its own.

    As in Megatron-Core `DistributedDataParallel`, `bucket=` applies only to the first stage: the sums of later stages
    overlap with its backward. On the last stage the copy of the token table takes the place of an untied head's weight,
    the last in the order.
    """
    names = sorted(sizes, key=lambda name: stage.copies_table and name == TABLE)
    return make_buckets(
        {name: sizes[name] for name in names},
        ranks=ranks,
        sharded=case.zero == 1,
        largest=case.bucket if stage.first else 0,
        apart=(TABLE,) if stage.shares_table else (),
    )


def accumulates_in_buffer(case: Case, name: str) -> bool:
    """Whether a linear adds the gradient of this weight to the buffer itself."""
    module, _, leaf = name.rpartition(".")
    table = module == "head" or (case.tied and module == "embedding.tokens")
    return case.wgrad != "plain" and leaf == "weight" and (table or is_column(module) or is_row(module))


class BucketsByAxis:
    """The buffers of experts and of all other parameters, whose copies lie on different ranks.

    `buckets` are the buffers by the mesh axis over which their parameters have copies.
    """

    def __init__(self, buckets: Mapping[str, Buckets]) -> None:
        self._buckets = buckets

    def prepare(self, rank: Rank) -> Rank:
        """Prepare every buffer. Each parameter of the returned rank comes from the buffer that holds it."""
        made = {axis: buckets.prepare(rank.of(axis)) for axis, buckets in self._buckets.items()}

        def merge_parts(part: Callable[[Rank], Mapping[str, _T]]) -> dict[str, _T]:
            return {name: part(made[rank.case.data_axis_of(name)])[name] for name in rank.parameters}

        return replace(
            rank,
            parameters=merge_parts(lambda one: one.parameters),
            places=merge_parts(lambda one: one.places),
            updated=merge_parts(lambda one: one.updated),
            updated_places=merge_parts(lambda one: one.updated_places),
        )

    def reduce(self, rank: Rank) -> None:
        """Complete the sums over the ranks that hold copies."""
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
        """Round masters into the parameters; with zero=1 gather every rank's part into them."""
        for axis, buckets in self._buckets.items():
            buckets.afterwards(rank.of(axis))
