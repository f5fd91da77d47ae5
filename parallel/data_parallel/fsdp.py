"""Parameters in shards of rows (zero=2, zero=3): gathered for use by units, their gradients reduced into the shards.

A unit is a layer, or the model itself for the parameters outside of layers. Experts, whose copies lie on other ranks,
are units of their own. Before a unit's forward its shards are gathered. After each backward of the unit its gradients
are summed over the ranks, and each rank keeps its own rows. With `shard=` fewer ranks than the data ranks share a
parameter; then the gradient shards are summed over the replicas once a step.

    zero=2   a unit stays gathered until its backward has ended
    zero=3   every unit but the model is dropped after its forward and gathered again before its backward

With `no_sync` each rank adds up the gradients of whole parameters, and reduces them in the backward of the last
micro-batch. With `prefetch` each unit starts to gather the unit that is used next before it computes; with zero=3 also
in backward.

Each chunk of a pipeline is a model of its own, with several micro-batches under way. A unit that backward has gathered
stays until a forward has used it too, or until the last backward of the step.

With zero=3 the second forward of a recomputed layer gathers it, and backward uses the same tensors. The optimizer steps
the shards. With `master=float32` these are float32 and rounded before every gather. Only prefetched gathers are
asynchronous. Sources: torch 2.13 `fully_shard`, `_PipelineStageBase`, whose `backward_maybe_with_nosync` keeps what is
gathered and reduces once (around.md 15.3); arXiv:1910.02054 for ZeRO.

Rank r of n holds rows [r*c, (r+1)*c) of d rows, with c = ceil(d/n), as torch.chunk cuts them. The last shards may be
shorter or empty. In collectives every shard is padded to c rows, so a unit of parameters j sends and receives

    U = sum over j of ceil(d_j/n) * n * (elements of a row of j)

elements, and rank r's part of the gathered buffer holds its padded shards end to end. A tensor without dims counts as
one row of one element.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.parallel.communication.collectives import Pending, all_reduce, reduce_scatter, start_all_gather
from shardproof.parallel.communication.layout import Axis, Cut, Placement, shard
from shardproof.parallel.communication.schedules import backward_order, is_inside, recomputed_modules
from shardproof.parallel.data_parallel.buckets import gradient_dtype, trained_dtype
from shardproof.parallel.model.strategy import Rank
from shardproof.parallel.model.transformer import Transformer
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of

REPLICAS = "replica"
"""The mesh axis over which shards are replicated."""
Shape = tuple[int, ...]


def shard_axis(case: Case, name: str = "") -> str:
    """The mesh axis over which a parameter is sharded. Without a name it is the axis of dense parameters."""
    return "shard" if case.shard else case.data_axis_of(name)


def padded_rows(rows: int, ranks: int) -> int:
    """Rows of one rank's padded shard."""
    return -(-rows // ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """The shapes of the parameters of a unit, which are gathered over `ranks` ranks together. Sizes count elements."""

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


_SavedView = tuple[int, tuple[int, ...], tuple[int, ...], int]
"""What stands for a saved view of a gathered parameter: the parameter's number, and the view's size, stride, offset."""


class Shards:
    """The units of one rank, as the parts of a step (`parallel.model.strategy.Step`)."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._units: list[_Unit] = []

    def prepare(self, rank: Rank) -> Rank:
        """Cut every parameter by rows, keep this rank's shard, and wrap each unit's forward with its gather."""
        axes = {name: rank.mesh.axis(shard_axis(self._case, name)) for name in rank.places}
        cuts = {name: Cut(axis=axis.name, dim=0, order="chunks") for name, axis in axes.items()}
        places = {name: replace(place, cuts=(*place.cuts, cuts[name])) for name, place in rank.places.items()}
        for stage, chunk in rank.chunks:
            assert isinstance(chunk, Transformer)
            units = dict[str, _Unit]()
            for module, names in units_of(self._case, filter(stage.holds, rank.parameters)).items():
                wholes = {name: rank.parameters[name] for name in names}
                units[module] = _Unit(self._case, chunk, module, wholes, axes[names[0]])
            if self._case.prefetch:
                self._link_prefetches(units, stage.layers)
            self._units += units.values()
        shards = {name: part for unit in self._units for name, part in unit.shards.items()}
        in_order = {name: shards[name] for name in rank.parameters}
        return replace(rank, parameters=in_order, places=places, updated=in_order, updated_places=places)

    def _link_prefetches(self, units: "Mapping[str, _Unit]", numbers: Sequence[int]) -> None:
        """Set the units that each unit starts to gather before it computes: the next in forward, and in backward."""
        layers = [units[f"layers.{number}"] for number in numbers]
        if root := units.get(""):  # a stage in the middle holds nothing outside of its layers
            root.following = layers[0]
        for unit, following in itertools.pairwise(layers):
            unit.following = following
        # with zero=2 a unit stays gathered until its backward
        for layer, earlier in itertools.pairwise(backward_order(self._case, numbers)) if self._case.zero == 3 else ():
            units[f"layers.{layer}"].preceding = units[f"layers.{earlier}"]

    def reduce(self, rank: Rank) -> None:
        """Complete the sums of the step: with `shard=` add every unit's gradient shards up over the replicas."""
        for unit in self._units:
            unit.sum_over(rank.mesh.axis(REPLICAS) if self._case.shard else None)

    def gradients(self) -> Mapping[str, Tensor]:
        """The padded shard of every parameter's gradient, flat."""
        return {name: part for unit in self._units for name, part in unit.gradients().items()}

    def hand_over(self, rank: Rank) -> None:
        """Set the gradients of the tensors that the optimizer steps, in their dtype and without padding."""
        padded = self.gradients()
        for name, tensor in rank.updated.items():
            tensor.grad = padded[name][: tensor.numel()].view(tensor.shape).to(tensor.dtype)

    def afterwards(self, _rank: Rank) -> None:
        """Do nothing: shards are gathered when they are used."""


class _Unit:
    """A unit on one rank: its shards, and its full parameters while it is gathered."""

    def __init__(self, case: Case, model: Transformer, module: str, wholes: Mapping[str, Tensor], axis: Axis) -> None:
        self._case, self._axis, self._model, self.module = case, axis, model, module
        self._layout = UnitLayout(shapes={name: tuple(whole.shape) for name, whole in wholes.items()}, ranks=axis.size)
        self._places_of_params = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in wholes
        }
        self.shards: dict[str, nn.Parameter] = {}
        at = {axis.name: (axis.rank, axis.size)}
        for name, whole in wholes.items():
            place = Placement(shape=tuple(whole.shape), cuts=(Cut(axis=axis.name, dim=0, order="chunks"),))
            rows = shard(whole.detach(), place, at)
            self.shards[name] = parameter = nn.Parameter(rows.to(trained_dtype(case)))
            owner, leaf = self._places_of_params[name]
            owner.register_parameter(leaf, parameter)
        device = next(iter(wholes.values())).device
        self._grad_shards = torch.zeros(self._layout.shard_elements, dtype=gradient_dtype(case), device=device)
        self._backwards_done = 0
        self._full_params: list[Tensor] = []
        self._pending_gather: Pending | None = None
        self._unreduced: list[Tensor] = []
        self.following: _Unit | None = None
        self.preceding: _Unit | None = None
        self._reshard_after_forward = case.zero == 3 and module != ""
        self._recomputed = is_inside(module, recomputed_modules(case))
        used = model.get_submodule(module)
        used.forward = functools.partial(self._forward, used.forward)

    def gradients(self) -> Mapping[str, Tensor]:
        """The padded shard of each parameter's summed gradient, flat."""
        return {name: self._grad_shards[first : first + size] for name, first, size in self._layout.places()}

    def start(self) -> None:
        """Start the all-gather of the unit, unless it is gathered or the gather is under way."""
        if self._full_params or self._pending_gather is not None:
            return
        dtype = dtype_of(self._case)
        flat = torch.zeros(self._layout.shard_elements, dtype=dtype, device=self._grad_shards.device)
        for name, first, _ in self._layout.places():
            part = self.shards[name].detach()
            flat[first : first + part.numel()].copy_(part.flatten())
        overlap = self._case.prefetch and self._case.overlap
        self._pending_gather = start_all_gather(flat, self._axis, dim=0, overlap=overlap)

    def gather(self) -> list[Tensor]:
        """The full parameters, gathered now unless the unit has them."""
        if not self._full_params:
            self.start()
            assert self._pending_gather is not None
            buffer, self._pending_gather = self._pending_gather.wait().view(self._axis.size, -1), None
            for name, first, size in self._layout.places():
                shape = self._layout.shapes[name]
                rows = buffer[:, first : first + size].reshape(-1, *shape[1:])[: shape[0]]
                self._full_params.append(rows.clone())
        return self._full_params

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Reduce-scatter the gradients of the full parameters into the step's sum, with no_sync only in the last
        micro-batch, and free the full parameters, in a pipeline only then.
        """
        last = self._backwards_done + 1 == self._case.micro
        # in a pipeline another micro-batch may be between its forward and its backward, so the unit stays gathered
        if last or self._case.pp == 1:
            self._full_params = []
            self._restore_shards()
        if self._case.no_sync:
            wide = [gradient.to(self._grad_shards.dtype) for gradient in gradients]
            gradients = (
                [kept + one for kept, one in zip(self._unreduced, wide, strict=True)] if self._unreduced else wide
            )
            self._backwards_done, self._unreduced = self._backwards_done + 1, [] if last else [*gradients]
            if not last:
                return
            self._backwards_done = 0
        ranks = self._axis.size
        buffer = torch.zeros(
            ranks, self._layout.shard_elements, dtype=self._grad_shards.dtype, device=self._grad_shards.device
        )
        for (_, first, _), gradient in zip(self._layout.places(), gradients, strict=True):
            height = padded_rows(gradient.shape[0], ranks)
            for index, rows in enumerate(gradient.split(height)):
                buffer[index, first : first + rows.numel()].copy_(rows.flatten())
        own = reduce_scatter(buffer.flatten(), self._axis, dim=0)
        self._grad_shards = self._grad_shards + own if self._backwards_done else own
        self._backwards_done += 1

    def sum_over(self, replicas: Axis | None) -> None:
        """Sum the gradient shards over the replicas, if any. The next gradient then begins a new sum."""
        if replicas is not None:
            self._grad_shards = all_reduce(self._grad_shards, replicas)
        self._backwards_done = 0

    def _forward(self, forward: Callable[..., Any], *args: Any) -> Any:
        """Run the unit's forward with the full parameters in place of its shards."""
        recomputing = self._model.again
        full_params = _Gather.apply(self, *self.shards.values())
        prefetched = self.preceding if recomputing else self.following
        if prefetched is not None:
            prefetched.start()
        for full_param, (owner, leaf) in zip(full_params, self._places_of_params.values(), strict=True):
            owner.__dict__[leaf] = full_param  # an attribute hides the registered parameter
        # A recomputed unit is gathered by its second forward, which comes before its backward.
        gather_in_backward = self._reshard_after_forward and not self._recomputed and torch.is_grad_enabled()
        try:
            if not gather_in_backward:
                return forward(*args)
            self._storages = [full_param.untyped_storage() for full_param in full_params]
            with torch.autograd.graph.saved_tensors_hooks(self._pack_saved, self._unpack_saved):
                return _GatherAgain.apply(self, forward(*args))
        finally:
            self._storages = []
            if self.module or not torch.is_grad_enabled():  # backward computes parts of the model again
                self._restore_shards()
            if self._reshard_after_forward and not recomputing:
                self._full_params = []

    def _restore_shards(self) -> None:
        """Take the full parameters out of the modules, so that these have their shards as parameters again."""
        for owner, leaf in self._places_of_params.values():
            owner.__dict__.pop(leaf, None)

    def _pack_saved(self, tensor: Tensor) -> Tensor | _SavedView:
        """What autograd keeps instead of a tensor: of a full parameter, which will be freed, only how it is viewed."""
        storage = tensor.untyped_storage()
        for number, own in enumerate(self._storages):
            if storage is own:
                return number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return tensor

    def _unpack_saved(self, kept: Tensor | _SavedView) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        number, size, stride, offset = kept
        return self.gather()[number].as_strided(size, stride, offset)


class _Gather(torch.autograd.Function):
    """Shards -> full parameters. Backward adds their gradients to the unit's own sum and returns None."""

    @staticmethod
    def forward(ctx: Any, unit: _Unit, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        return tuple(full_param.detach() for full_param in unit.gather())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.unit.reduce(gradients)
        return (None,) * (1 + len(gradients))


class _GatherAgain(torch.autograd.Function):
    """The identity. Its backward gathers the unit before any of its modules needs it, and starts to gather the unit
    that backward uses next.
    """

    @staticmethod
    def forward(ctx: Any, unit: _Unit, y: Tensor) -> Tensor:
        ctx.unit = unit
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.unit.gather()
        if ctx.unit.preceding is not None:
            ctx.unit.preceding.start()
        return None, gradient


def units_of(case: Case, names: Iterable[str]) -> dict[str, list[str]]:
    """Names of parameters by the module with which they are gathered: a layer, experts, or "" for the model."""
    units = dict[str, list[str]]()
    for name in names:
        first, number, *_ = [*name.split("."), ""]
        module = f"{first}.{number}" if first == "layers" else ""
        # parameters sharded over other ranks than dense ones are a unit of their own, as experts are in torchtitan
        own = shard_axis(case, name) != shard_axis(case)
        units.setdefault(name.rsplit(".", 2)[0] if own else module, []).append(name)
    return units
