"""Experts in the place of a layer's MLP: hidden states in and out as the mode has them.

A rank routes tokens of its own. Where hidden states are whole on every tensor rank each of these takes its part of the
sequence before, and all parts are gathered behind: copies of a token would each send its gradient to the experts, which
would be tp times as large (experts.md 22.1). The shared expert is an MLP of the mode's own linears, beside them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel.communication.layout import Placement, local_shape
from parallel.communication.mesh import Mesh, coordinates
from parallel.communication.pairs import gather_from_sequence, scatter_to_sequence
from parallel.experts.counts import rows_sent, tokens_of
from parallel.experts.dispatch import ByAllGather, ByAllToAll
from parallel.experts.linears import Experts
from parallel.experts.router import Router, select, weigh
from parallel.layers.mlp import Mlp
from reference.case import Case
from reference.data.routing import forced
from reference.model.parameters import dtype_of

__all__ = ["ExpertBlock"]


class _Gate(nn.Module):
    """sigmoid(x wg), [.., .., 1]."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((1, case.hidden), dtype=dtype_of(case), device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states -> the gate of every token."""
        return functional.linear(x, self.weight).sigmoid()


class ExpertBlock(nn.Module):
    """`name` is its dotted one, "layers.1.mlp"; `places` how its parameters lie; `shared` the MLP of all tokens.

    `draw` is the step and the micro-batch that it computes. `chosen` are the choices of a step by micro-batch, as
    hidden states lie: bool [.., .., experts].
    """

    draw: tuple[int, int] = (0, 0)

    def __init__(
        self,
        case: Case,
        mesh: Mesh,
        places: dict[str, Placement],
        device: torch.device,
        name: str,
        *,
        sequence_dim: int,
        shared: Mlp | None,
    ) -> None:
        super().__init__()
        self.case, self.block, self.sequence_dim = case, name.removesuffix(".mlp"), sequence_dim
        self.tp, self.at = mesh.axis("tp"), coordinates(case, mesh.rank)
        self.router = Router(case, device)
        own = f"{name}.experts."
        shapes = {
            key.removeprefix(own).removesuffix(".weight"): local_shape(place, self.at)
            for key, place in places.items()
            if key.startswith(own)
        }
        self.experts = Experts(case.activation, shapes, dtype_of(case), device)
        if shared is not None:
            self.shared = shared
        if case.shared_gate:
            self.shared_gate = _Gate(case, device)
        self.dispatch = (ByAllGather if case.dispatcher == "allgather" else ByAllToAll)(case, mesh)
        self.chosen: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states -> hidden states."""
        own = x if self.case.system.sequence else scatter_to_sequence(x, self.tp, dim=self.sequence_dim)
        y = self._routed(own)
        if not self.case.system.sequence:
            y = gather_from_sequence(y, self.tp, dim=self.sequence_dim, tensor_parallel_output_grad=False)
        if self.case.shared_ffn:
            shared = self.shared(x)
            y = y + (shared * self.shared_gate(x) if self.case.shared_gate else shared)
        return y

    def _routed(self, x: Tensor) -> Tensor:
        """The same for this rank's own tokens, without the shared expert."""
        step, micro = self.draw
        logits = self.router(x)
        logits_TE = logits.flatten(0, 1)
        chosen_TE = self._chosen(logits_TE)
        self.chosen[micro] = chosen_TE.unflatten(0, x.shape[:2])
        weights_TE = weigh(self.case, logits_TE, chosen_TE)
        known = partial(self._sent_by, step, micro)
        return self.dispatch(x.flatten(0, 1), weights_TE, chosen_TE, self.experts, known).view_as(x)

    def _chosen(self, logits_TE: Tensor) -> Tensor:
        """The experts of every token, bool [T, E]."""
        if self.case.routing == "learned":
            if logits_TE.is_meta:
                raise ValueError("routing=learned: depends on values, and there are shapes alone; legal: routing=equal")
            return select(self.case, logits_TE)
        tokens_BS = tokens_of(self.case, self.at, *self.draw)
        tokens = (tokens_BS.T if self.sequence_dim == 0 else tokens_BS).flatten()
        return forced(self.case, self.case.blocks[self.block], tokens).to(logits_TE.device)

    def _sent_by(self, step: int, micro: int, rank: int) -> tuple[int, ...]:
        return rows_sent(self.case, self.block, step, micro)[rank]
