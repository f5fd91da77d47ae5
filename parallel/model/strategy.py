"""The strategy: everything that the schemes of a case decide, as values. The transformer and the training read these.

A `Strategy` knows cases but no running world. Its `parts` make the modules of one rank, and its `step` is the work of a
step around them. Modules made by `Parts` keep the canonical names. Every collective belongs to the module that needs
its result: it is issued in that module's `forward`, or in the backward of a node made there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from shardproof.parallel.communication.batch import Delivered
from shardproof.parallel.communication.expectation import CallRow
from shardproof.parallel.communication.layout import Axis, Box, Cut, Mesh, Placement, pieces
from shardproof.parallel.communication.schedules import Stage
from shardproof.parallel.layers.attention import Exchange, MaskedCore, core_attention, no_exchange
from shardproof.parallel.layers.loss import Metric, Terms
from shardproof.parallel.layers.randomness import Dropout
from shardproof.parallel.model.loss_scale import LossScaling
from shardproof.reference.case import Case

MakesLayer = Callable[[str], nn.Module]
"""Makes a transformer layer of this dotted name, like those of the decoder."""
_T = TypeVar("_T")
Value = Tensor | tuple[Box, ...]
"""A value of an outcome: a full tensor, or the boxes that this rank holds of it."""
Scheduled = tuple[Tensor, Tensor, tuple[Box, ...] | None]
"""Loss sum, number of tokens and logits of a step on a rank; 0, 0 and None if it does not hold the last stage."""


def _whole_batch(batch: Delivered) -> Delivered:
    return batch


def _unchanged_step(_case: Case, step: "Step") -> "Step":
    return step


def _shares(case: Case) -> Placement:
    rows, length = case.rows, case.row_tokens
    return Placement(shape=(rows, case.heads, length, length), cuts=(Cut(axis="tp", dim=1),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A strategy on one rank: it makes the modules that communicate.

    linear        makes the linear of a dotted name ("layers.0.mlp.w1"). A column linear takes hidden states and returns
                  inner features, a row linear takes inner features and returns hidden states
    embedding     makes the module that takes (tokens [B,S], positions [B,S])
    head          makes the module that takes (hidden states, embedding weight)
    loss          (logits, labels), both in the strategy's layout -> every token's loss
    core          attention of some queries over keys; `exchange` goes around it (`parallel.layers.attention`)
    local         delivered micro-batch -> this rank's part of it
    behind_layer  name -> makes a feature's module; hidden states pass through all of these when they leave a layer
    branches      feature -> makes the module that replaces a layer's attention or MLP (`Core.replaced_branches`), from
                  its dotted name and the rank's dropout; it takes the arguments of what it replaces
    behind_head   name (`Core.behind_decoder`) -> makes a feature's module from a function that makes a transformer
                  layer; the module takes (logits, normed hidden states, micro-batch, the `Transformer`), returns logits
    terms         what modules add to the loss
    saved_over    axis whose ranks share the saved inputs of recomputed layers; None: each rank saves them whole
    """

    linear: Callable[[str], nn.Module]
    embedding: Callable[[], nn.Module]
    head: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    core: MaskedCore = core_attention
    exchange: Exchange = no_exchange
    local: Callable[[Delivered], Delivered] = _whole_batch
    behind_layer: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    branches: Mapping[str, Callable[[str, Dropout], nn.Module]] = field(default_factory=dict)
    behind_head: Mapping[str, Callable[[MakesLayer], nn.Module]] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)
    saved_over: Axis | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strategy:
    """A way to split the work.

    sequence_dim      where the sequence lies in hidden states: 0 for [S, B, D], 1 for [B, S, D]
    weight_axis       mesh axis over which parameters are split, and over which partial gradients are summed
    data_axes         mesh axes over which gradients of different data are summed, one flat all-reduce each
    loss_axes         mesh axes over which the loss sum and the token count of a rank are summed
    placements        case -> how every parameter lies on the mesh
    activation        (case, module) -> how its output [rows of a data rank, seq, width] lies, None if unknown
    shares            case -> how attention probabilities [rows of a data rank, heads, queries, keys] lie in the core
    partial           (case, parameter whole on every rank) -> is its gradient on one rank a partial sum?
    coalesced         are the partial gradients summed in one flat all-reduce (Megatron), or in one each (InternEvo)?
    norm_axes         mesh axes beside the weight axis that split gradients: the squared norm is summed over them
    expert_data_axes  data axis of experts, which have a rank order of their own -> axes that split their gradients
    parts             (case, mesh, device) -> the strategy on one rank
    rows              the calls that its modules and schemes make (`rows_of` adds those of gradients, loss and norm)
    step              (case, the plain step) -> the step of this strategy
    """

    name: str
    sequence_dim: int
    weight_axis: str = "tp"
    data_axes: tuple[str, ...] = ("dp",)
    loss_axes: tuple[str, ...] = ("dp",)
    placements: Callable[[Case], dict[str, Placement]]
    activation: Callable[[Case, str], Placement | None]
    shares: Callable[[Case], Placement] = _shares
    partial: Callable[[Case, str], bool]
    coalesced: bool = True
    norm_axes: tuple[str, ...] = ()
    expert_data_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parts: Callable[[Case, Mesh, torch.device], Parts]
    rows: tuple[CallRow, ...]
    step: "Callable[[Case, Step], Step]" = _unchanged_step

    def laid_out(self, x_BS: Tensor) -> Tensor:
        """A tensor [B, S, ...] with its dims in the order of this strategy's hidden states; applied twice it gives the
        tensor back.
        """
        return x_BS.transpose(0, 1) if self.sequence_dim == 0 else x_BS


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The work of a rank, in this order; a scheme replaces parts of it (`dataclasses.replace`).

    prepare     adds shards, buffers and hooks to the rank; called once, when its model is built and filled
    optimizer   makes the optimizer of `Rank.updated`; called once
    schedule    (rank, step) -> loss sum, number of tokens, logits; runs every micro-batch forward and backward
    partial     the gradients that the reductions sum
    reductions  by name, run one after the other: they sum gradients over ranks and leave the sums in `Rank.gradients`
    norm        the norm of the full gradients of the mean loss, the same on every rank
    afterwards  completes the parameters after the optimizer's step: rounds masters into them, gathers parts
    beside      (rank, step) -> further entries of the outcome, which only this scheme adds
    loss_scale  the scale of the gradients between schedule and norm; None if they are not scaled
    """

    prepare: "Callable[[Rank], Rank]"
    schedule: "Callable[[Rank, int], Scheduled]"
    reductions: "Mapping[str, Callable[[Rank], None]]"
    partial: "Callable[[Rank], Mapping[str, Tensor]]"
    norm: "Callable[[Rank], Tensor]"
    optimizer: "Callable[[Rank], torch.optim.Optimizer]"
    afterwards: "Callable[[Rank], None]"
    beside: "Callable[[Rank, int], Mapping[str, Value]]"
    loss_scale: LossScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank at work under its strategy: chunks of the model, all parameters and their places, metric, dropout.

    Without a pipeline the one chunk is the whole model. `updated` are the tensors that the optimizer steps, by the
    names of the parameters, and `updated_places` says how they and their gradients lie. These tensors are the
    parameters themselves, unless a scheme splits or copies them.
    """

    case: Case
    strategy: Strategy
    step: Step
    mesh: Mesh
    device: torch.device
    parts: Parts
    chunks: tuple[tuple[Stage, nn.Module], ...]
    parameters: Mapping[str, Tensor]
    places: Mapping[str, Placement]
    updated: Mapping[str, Tensor]
    updated_places: Mapping[str, Placement]
    metric: Metric | None
    dropout: Dropout

    @property
    def model(self) -> nn.Module:
        """The first chunk; without a pipeline this is the whole model."""
        return self.chunks[0][1]

    def of(self, data_axis: str) -> "Rank":
        """This rank with only the parameters that have copies over a mesh axis (`Core.data_axis_of`)."""

        def own(tensors: Mapping[str, _T]) -> dict[str, _T]:
            return {name: one for name, one in tensors.items() if self.case.data_axis_of(name) == data_axis}

        return replace(
            self,
            parameters=own(self.parameters),
            places=own(self.places),
            updated=own(self.updated),
            updated_places=own(self.updated_places),
        )

    @property
    def has_numbers(self) -> bool:
        """Whether tensors have numbers to compare: not on the meta device."""
        # A run on shapes alone must need no more memory than training, so callers leave the rest out.
        return self.device.type != "meta"

    def boxes(self, local: Tensor, place: Placement) -> tuple[Box, ...]:
        """The boxes of the full tensor that a local tensor of this rank holds."""
        return pieces(local, place, self.mesh.coordinates)

    def value(self, local: Tensor, place: Placement) -> Value:
        """A local tensor of this layout as a value of the outcome."""
        return self.boxes(local, place) if place.cuts else local

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of every tensor that the optimizer steps, by name; `updated_places` says how they lie."""
        return {name: tensor.grad for name, tensor in self.updated.items() if tensor.grad is not None}
