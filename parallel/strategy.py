"""The strategy: everything that a mode decides, as values. The transformer and the training read these alone.

A `Mode` knows cases but no running world; `parts` binds it to one rank's mesh. A mode is its file in `parallel.modes`:
a table, one `Mode` value, one closed form. Modules built by `Parts` keep the canonical names and talk in their own
`forward` (and in the backward of the nodes made there), so that every call belongs to the module that needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from parallel.attention import Exchange, direct
from parallel.batch import Delivered
from parallel.expectation import Term
from parallel.layout import Placement
from parallel.mesh import Mesh
from reference.case import Case

__all__ = ["Mode", "Parts"]


def _same(batch: Delivered) -> Delivered:
    return batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A mode on one rank: the modules that talk, and what happens around the parts that do not.

    `linear` makes the module of a dotted name ("layers.0.mlp.w1"): hidden states in and inner features out for a
    column linear, the other way round for a row linear. `embedding` takes (tokens [B,S], positions [B,S]), `head`
    takes (hidden states, embedding weight). `loss` gives every token's loss from (logits, labels), both in the
    mode's layout. `local` is this rank's part of a delivered micro-batch.
    """

    linear: Callable[[str], nn.Module]
    embedding: Callable[[], nn.Module]
    head: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    exchange: Exchange = direct
    local: Callable[[Delivered], Delivered] = _same


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to split the work.

    sequence_dim   where the sequence lies in hidden states: 0 for [S, B, D], 1 for [B, S, D]
    weight_axis    mesh axis over which parameters are split, and over which partial gradients are summed
    data_axes      mesh axes over which gradients of different data are summed, one flat all-reduce each
    loss_axes      mesh axes over which the loss sum and the token count of a rank are summed
    placements     case -> how every parameter lies on the mesh
    activation     (case, module) -> how its output [rows of a data rank, seq, width] lies on the mesh, None if unknown
    partial        (case, parameter whole on every rank) -> is its gradient on one rank a partial sum?
    coalesced      are the partial gradients summed in one flat all-reduce (Megatron), or in one each (InternEvo)?
    partial_op     reduce op of the partial gradients
    mean_axes      mesh axes over whose ranks gradients are means and not sums: none is right, see `parallel.variants`
    parts          (case, mesh, device) -> the strategy bound to one rank
    expected       case -> its closed form
    """

    name: str
    sequence_dim: int
    weight_axis: str = "tp"
    data_axes: tuple[str, ...] = ("dp",)
    loss_axes: tuple[str, ...] = ("dp",)
    placements: Callable[[Case], dict[str, Placement]]
    activation: Callable[[Case, str], Placement | None]
    partial: Callable[[Case, str], bool]
    coalesced: bool = True
    partial_op: str = "sum"
    mean_axes: tuple[str, ...] = ()
    parts: Callable[[Case, Mesh, torch.device], Parts]
    expected: Callable[[Case], Iterable[Term]]

    def laid_out(self, x_BS: Tensor) -> Tensor:
        """A tensor [B, S, ...] with its dims in the order of this mode's hidden states, and back."""
        return x_BS.transpose(0, 1) if self.sequence_dim == 0 else x_BS
