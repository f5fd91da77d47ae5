"""Experts in the place of a layer's MLP: hidden states in and out as the mode has them.

A rank routes tokens of its own. Where hidden states are whole on every tensor rank, each takes its part of the
sequence first, and the outputs are gathered in the end. Otherwise tp copies of a token would each send its
gradient to the experts, tp times the right one (experts.md 22.1). The shared expert is an MLP of the mode's linears.

`OwnExperts` sends T rows, sorted by expert, through the MLPs that this rank holds. Weights are [experts of the rank,
out, in]. Each of the `etp` ranks holds a part of the inner features, so that outputs are partial sums over etp. The
router's weight of a row multiplies its inner features, cast back to their dtype. Source: Megatron-Core 0.16.1
`SequentialMLP` (experts.md 21.6).
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication.layout import Coordinates, Placement, local_shape
from shardproof.parallel.communication.mesh import Mesh, coordinates
from shardproof.parallel.communication.pairs import gather_from_sequence, scatter_to_sequence
from shardproof.parallel.experts.counts import places_of, rows_sent, tokens_of
from shardproof.parallel.experts.dispatch import ByAllGather, ByAllToAll, taken, taken_of_all
from shardproof.parallel.experts.router import Router, balance_term, has_balance, select, weigh
from shardproof.parallel.layers.block import Mlp
from shardproof.parallel.layers.loss import Terms
from shardproof.parallel.model.strategy import Rank
from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.data.routing import forced
from shardproof.reference.model.parameters import dtype_of


class _Stacked(nn.Module):
    """The weights of one linear of every expert."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        self.weight.allreduce = False  # type: ignore[attr-defined]  # as Megatron-Core and DeepSpeed mark experts


class OwnExperts(nn.Module):
    """The experts of a rank; `shapes` are the local ones of up, down and, for swiglu, gate."""

    def __init__(
        self, activation: str, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.activation = activation
        for leaf, shape in shapes.items():
            self.add_module(leaf, _Stacked(shape, dtype, device))

    def forward(self, x_TH: Tensor, weights_T: Tensor, rows: Sequence[int]) -> Tensor:
        """Rows -> rows; `rows` says how many are each expert's, which may be none."""
        parts = zip(x_TH.split(list(rows)), weights_T.split(list(rows)), strict=True)
        return torch.cat([self._one(expert, *part) for expert, part in enumerate(parts)])

    def _one(self, expert: int, x_TH: Tensor, weights_T: Tensor) -> Tensor:
        inner = self._activated(expert, x_TH)
        inner = (inner * weights_T[:, None]).to(inner.dtype)
        return functional.linear(inner, self._weight("down", expert))

    def _activated(self, expert: int, x_TH: Tensor) -> Tensor:
        gated = self.activation == "swiglu"  # the gate comes first, so that backward completes its gradient last
        gate = functional.silu(functional.linear(x_TH, self._weight("gate", expert))) if gated else x_TH
        up = functional.linear(x_TH, self._weight("up", expert))
        match self.activation:
            case "swiglu":
                return gate * up
            case "relu":
                return functional.relu(up)
            case _:
                return functional.gelu(up, approximate="tanh")

    def _weight(self, leaf: str, expert: int) -> Tensor:
        stacked: Tensor = self.get_submodule(leaf).weight[expert]  # type: ignore[index]
        return stacked


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
        terms: Terms,
    ) -> None:
        super().__init__()
        self.case, self.block, self.sequence_dim = case, name.removesuffix(".mlp"), sequence_dim
        self.mesh, self.tp, self.at, self.terms = mesh, mesh.axis("tp"), coordinates(case, mesh.rank), terms
        self.router = Router(case, device)
        own = f"{name}.experts."
        shapes = {
            key.removeprefix(own).removesuffix(".weight"): local_shape(place, self.at)
            for key, place in places.items()
            if key.startswith(own)
        }
        self.experts = OwnExperts(case.activation, shapes, dtype_of(case), device)
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
        """The outputs of routed experts for this rank's own tokens."""
        step, micro = self.draw
        logits = self.router(x)
        logits_TE = logits.flatten(0, 1)
        chosen_TE = self._chosen(logits_TE)
        weights_TE = weigh(self.case, logits_TE, chosen_TE)
        if has_balance(self.case):
            logits_BSE, chosen_BSE = (self._by_row(one.unflatten(0, x.shape[:2])) for one in (logits_TE, chosen_TE))
            balance = balance_term(self.case, self.mesh, logits_BSE, chosen_BSE, self._counted(x.device))
            weights_TE = self.terms.attached(weights_TE, balance)
        if self.case.capacity:
            chosen_TE = self._taken(weights_TE, chosen_TE)
            weights_TE = weights_TE * chosen_TE
        self.chosen[micro] = chosen_TE.unflatten(0, x.shape[:2])
        known = partial(self._sent_by, step, micro)
        return self.dispatch(x.flatten(0, 1), weights_TE, chosen_TE, self.experts, known).view_as(x)

    def _chosen(self, logits_TE: Tensor) -> Tensor:
        """The experts of every token, bool [T, E]."""
        if self.case.routing == "learned":
            if logits_TE.is_meta:
                raise ValueError("routing=learned: depends on values, and there are shapes alone; legal: routing=equal")
            return select(self.case, self.router.selecting(logits_TE))
        return forced(self.case, self.case.blocks[self.block], self._tokens(self.at)).to(logits_TE.device)

    def _counted(self, device: torch.device) -> Tensor | None:
        """Which of this rank's own tokens balance losses count, bool [rows, places of a row]; None: all."""
        if self.case.balance_of == "all":
            return None
        batch = micro_batch(self.case, *self.draw, self.at["dp"][0])
        counted_BS = batch.counted.reshape(self.case.rows, self.case.row_tokens)
        return counted_BS[:, places_of(self.case, self.at)].to(device)

    def _taken(self, weights_TE: Tensor, chosen_TE: Tensor) -> Tensor:
        """The choices that experts take, bool [T, E]."""
        if self.case.capacity_of == "rank":
            return taken(self.case, weights_TE, chosen_TE, self._tokens(self.at))
        holders = self.mesh.axis("tp_cp")
        numbers_RT = torch.stack([self._tokens(coordinates(self.case, rank)) for rank in holders.ranks])
        return taken_of_all(self.case, weights_TE, chosen_TE, numbers_RT, holders)

    def _tokens(self, at: Coordinates) -> Tensor:
        """The numbers of the tokens of the rank at these coordinates, as hidden states have them end to end."""
        return self._by_row(tokens_of(self.case, at, *self.draw)).flatten()

    def _by_row(self, x: Tensor) -> Tensor:
        """Rows first where hidden states have places first, and back."""
        return x.transpose(0, 1) if self.sequence_dim == 0 else x

    def _sent_by(self, step: int, micro: int, rank: int) -> tuple[int, ...]:
        return rows_sent(self.case, self.block, step, micro, rank)


def blocks_of(rank: Rank) -> dict[str, ExpertBlock]:
    """The blocks of a rank, by their dotted names."""
    named = (pair for _, chunk in rank.chunks for pair in chunk.named_modules())
    return {name: block for name, block in named if isinstance(block, ExpertBlock)}
