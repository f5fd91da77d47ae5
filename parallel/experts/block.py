"""Experts in place of a layer's MLP, with hidden states in the layout of the mode.

A rank routes tokens of its own. If the tensor ranks hold the same hidden states, each takes its part of the sequence
first, and the outputs are gathered at the end. If each routed all tokens instead, the experts would get tp times the
right gradient (experts.md 22.1). The shared expert is an MLP of the mode's linears.

`OwnExperts` sends rows, sorted by expert, through the MLPs that this rank holds. Weights are [experts of the rank, out,
in]. Each of the `etp` ranks holds a part of the inner features, so outputs are partial sums over etp. Source:
Megatron-Core 0.16.1 `SequentialMLP` (experts.md 21.6).

The router selects the `top_k` experts of a token with the largest scores, and weighs their outputs:

    router        scores       weights of the selected experts
    softmax       the logits   the softmax over the selected logits
    pre-softmax   the logits   the softmax over all logits, not normalised again
    sigmoid       sigmoids     the sigmoids, divided by their sum if top_k > 1

Of equal scores the expert with the smaller number is selected, which `torch.topk` leaves open. All weights are
multiplied by `router_scale`. With `router_groups`, experts are selected from `kept_groups` of the groups: those in
which the top_k / kept_groups best scores have the largest sum. With `bias_rate`, a bias is added to the sigmoids that
select, not to the weights. Letters: T tokens, E experts. Source: Megatron-Core 0.16.1
`topk_routing_with_score_function` (experts.md 21.1).

Balance losses are terms of the summed loss that push routers to use all experts alike. For T tokens, K = top_k:

    aux_loss        E/(K T^2) * sum over experts of (rows of the expert) * (sum of its scores), of a micro-batch
    sequence_loss   the same of each row of the batch; the mean over its rows
    global_loss     the same of the micro-batches that all data ranks have at once; T is then the number of all tokens
    z_loss          1/T * the sum of logsumexp(logits)^2

Here scores are the softmax, or the sigmoids divided by their sum over all experts; they alone select, without groups
and bias.
A rank sums the scores of its own tokens only, so the terms of all ranks add up to the loss. Rows are counted over all
ranks that hold the micro-batch, by one all-reduce of integers for each loss. Each term is multiplied by T, because the
gradients of a step are divided by its counted tokens. With balance_of=counted T is the number of tokens whose loss
counts, summed in the same call; in Megatron's per-token mode it was the rank's own number (experts.md 21.5, X1).
Source: Megatron-Core 0.16.1 `switch_load_balancing_loss_func`, `z_loss_func`; arXiv:2101.03961, 2202.08906.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.layout import Coordinates, Mesh, Placement, coordinates, local_shape
from shardproof.parallel.communication.pairs import gather_from_sequence, scatter_to_sequence
from shardproof.parallel.experts.counts import places_of, rows_sent, tokens_of
from shardproof.parallel.experts.dispatch import ByAllGather, ByAllToAll, apply_capacity, taken_of_all
from shardproof.parallel.layers.block import Mlp
from shardproof.parallel.layers.loss import Terms
from shardproof.parallel.model.strategy import Rank
from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.data.routing import forced_experts
from shardproof.reference.model.parameters import dtype_of


def has_balance(case: Case) -> bool:
    """Whether the case has a balance loss."""
    return any((case.aux_loss, case.sequence_loss, case.global_loss, case.z_loss))


def balance_term(case: Case, mesh: Mesh, logits_BSE: Tensor, chosen_BSE: Tensor, counted_BS: Tensor | None) -> Tensor:
    """The sum [] of all balance losses over this rank's tokens, or over those that `counted_BS` marks.

    With forced routing the choices count as given.
    """
    share_BSE = scores(case, logits_BSE)
    if case.routing == "learned":
        chosen_BSE = select(case, share_BSE, plain=True)
    factor, term = case.experts / case.top_k, logits_BSE.new_zeros(())
    if counted_BS is not None:
        share_BSE, chosen_BSE = share_BSE * counted_BS[..., None], chosen_BSE & counted_BS[..., None]
    if case.aux_loss and counted_BS is None:
        rows_E = all_reduce(chosen_BSE.sum((0, 1)), mesh.axis("tp_cp"))
        balance = (rows_E * share_BSE.sum((0, 1))).sum() * factor / case.tokens**2
        term = term + case.aux_loss * case.tokens * balance
    elif case.aux_loss and counted_BS is not None:
        mine = torch.cat([chosen_BSE.sum((0, 1)), counted_BS.sum()[None]])
        *_, tokens = rows_E = all_reduce(mine, mesh.axis("tp_cp"))
        balance = (rows_E[:-1] * share_BSE.sum((0, 1))).sum() * factor / tokens.clamp(min=1)
        term = term + case.aux_loss * balance
    if case.global_loss:
        rows_E = all_reduce(chosen_BSE.sum((0, 1)), mesh.axis("tp_cp_dp"))
        balance = (rows_E * share_BSE.sum((0, 1))).sum() * factor / case.tokens**2 / case.dp
        term = term + case.global_loss * case.tokens * balance
    if case.sequence_loss:
        rows_BE = all_reduce(chosen_BSE.sum(1), mesh.axis("tp_cp"))
        balance = (rows_BE * share_BSE.sum(1)).sum() * factor / case.row_tokens**2 / case.rows
        term = term + case.sequence_loss * case.tokens * balance
    if case.z_loss:
        logits_BSE = logits_BSE if counted_BS is None else logits_BSE[counted_BS]
        term = term + case.z_loss * torch.logsumexp(logits_BSE, -1).square().sum()
    return term


def router_dtype(case: Case) -> torch.dtype:
    """The dtype of logits, and of the weights that are computed from them."""
    dtype: torch.dtype = dtype_of(case) if case.router_dtype == "model" else getattr(torch, case.router_dtype)
    return dtype


class Router(nn.Module):
    """A linear whose weight is whole on every rank, computed in `router_dtype`; `bias` only helps to select experts."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        self.dtype = router_dtype(case)
        shape = (case.experts, case.hidden)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype_of(case), device=device))
        self.bias = torch.zeros(case.experts, dtype=torch.float64, device=device)
        self.is_sigmoid = case.router == "sigmoid"

    def selection_scores(self, logits: Tensor) -> Tensor:
        """The scores by which experts are selected."""
        return logits.sigmoid() + self.bias if self.is_sigmoid else logits

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [.., .., hidden] -> logits [.., .., E]."""
        return functional.linear(x.to(self.dtype), self.weight.to(self.dtype))


def scores(case: Case, logits: Tensor) -> Tensor:
    """The scores of all experts for each token, [.., E]; their sum is 1."""
    if case.router != "sigmoid":
        return logits.softmax(-1)
    one = logits.sigmoid()
    return one / (one.sum(-1, keepdim=True) + 1e-20)


def select(case: Case, score: Tensor, *, plain: bool = False) -> Tensor:
    """The experts of every token by these scores, bool [.., E]. With `plain` groups are ignored."""
    score = score.detach()
    if case.router_groups > 1 and not plain:
        members = score.unflatten(-1, (case.router_groups, -1))
        each = case.top_k // case.kept_groups
        of_groups = torch.topk(members, each, dim=-1).values.sum(-1)
        open_groups = _first(of_groups, case.kept_groups)[..., None]
        score = torch.where(open_groups, members, -torch.inf).flatten(-2)
    return _first(score, case.top_k)


def _first(score: Tensor, count: int) -> Tensor:
    ranked = torch.argsort(score, dim=-1, descending=True, stable=True)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, ranked[..., :count], True)


def weigh(case: Case, logits_TE: Tensor, chosen_TE: Tensor) -> Tensor:
    """The weight of every expert for every token, [T, E], 0 where it is not chosen."""
    if case.router == "softmax":
        shares = torch.where(chosen_TE, logits_TE, -torch.inf).softmax(-1)
    elif case.router == "pre-softmax":
        shares = logits_TE.softmax(-1).where(chosen_TE, 0)
    else:
        shares = logits_TE.sigmoid().where(chosen_TE, 0)
        if case.top_k > 1:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    weights: Tensor = shares * case.router_scale
    return weights


class _Stacked(nn.Module):
    """The weights of one linear of every expert."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
        self.weight.allreduce = False  # type: ignore[attr-defined]  # as Megatron-Core and DeepSpeed mark experts


class OwnExperts(nn.Module):
    """The experts of a rank; `shapes` are the local shapes of up, down and, for swiglu, gate."""

    def __init__(
        self, activation: str, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.activation = activation
        for leaf, shape in shapes.items():
            self.add_module(leaf, _Stacked(shape, dtype, device))

    def forward(self, x_TH: Tensor, weights_T: Tensor, rows: Sequence[int]) -> Tensor:
        """The outputs of rows sorted by expert. `rows` is the number of rows of each expert, and may be 0."""
        parts = zip(x_TH.split(list(rows)), weights_T.split(list(rows)), strict=True)
        return torch.cat([self._one(expert, *part) for expert, part in enumerate(parts)])

    def _one(self, expert: int, x_TH: Tensor, weights_T: Tensor) -> Tensor:
        inner = self._inner_features(expert, x_TH)
        inner = (inner * weights_T[:, None]).to(inner.dtype)
        return functional.linear(inner, self._weight("down", expert))

    def _inner_features(self, expert: int, x_TH: Tensor) -> Tensor:
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
    """A router, experts and perhaps a shared expert (`shared`). `name` is the block's dotted name, "layers.1.mlp".

    `draw` is the step and the micro-batch that it computes now. `chosen` has the choices of the latest step by
    micro-batch, for this rank's tokens in the layout of hidden states: bool [.., .., experts].
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
        y = self._route_tokens(own)
        if not self.case.system.sequence:
            y = gather_from_sequence(y, self.tp, dim=self.sequence_dim, tensor_parallel_output_grad=False)
        if self.case.shared_ffn:
            shared = self.shared(x)
            y = y + (shared * self.shared_gate(x) if self.case.shared_gate else shared)
        return y

    def _route_tokens(self, x: Tensor) -> Tensor:
        """The outputs of routed experts for this rank's own tokens."""
        step, micro = self.draw
        logits = self.router(x)
        logits_TE = logits.flatten(0, 1)
        chosen_TE = self._choose_experts(logits_TE)
        weights_TE = weigh(self.case, logits_TE, chosen_TE)
        if has_balance(self.case):
            logits_BSE, chosen_BSE = (self._by_row(one.unflatten(0, x.shape[:2])) for one in (logits_TE, chosen_TE))
            balance = balance_term(self.case, self.mesh, logits_BSE, chosen_BSE, self._counted_tokens(x.device))
            weights_TE = self.terms.attach(weights_TE, balance)
        if self.case.capacity:
            chosen_TE = self._apply_capacity(weights_TE, chosen_TE)
            weights_TE = weights_TE * chosen_TE
        self.chosen[micro] = chosen_TE.unflatten(0, x.shape[:2])
        known = partial(self._sent_by, step, micro)
        return self.dispatch(x.flatten(0, 1), weights_TE, chosen_TE, self.experts, known).view_as(x)

    def _choose_experts(self, logits_TE: Tensor) -> Tensor:
        """The experts of every token, bool [T, E]."""
        if self.case.routing == "learned":
            if logits_TE.is_meta:
                raise ValueError("routing=learned: depends on values, and there are shapes alone; legal: routing=equal")
            return select(self.case, self.router.selection_scores(logits_TE))
        return forced_experts(self.case, self.case.blocks[self.block], self._tokens(self.at)).to(logits_TE.device)

    def _counted_tokens(self, device: torch.device) -> Tensor | None:
        """A mask of this rank's tokens, bool [rows, places of a row]: those in balance losses. None means all."""
        if self.case.balance_of == "all":
            return None
        batch = micro_batch(self.case, *self.draw, self.at["dp"][0])
        counted_BS = batch.counted.reshape(self.case.rows, self.case.row_tokens)
        return counted_BS[:, places_of(self.case, self.at)].to(device)

    def _apply_capacity(self, weights_TE: Tensor, chosen_TE: Tensor) -> Tensor:
        """The choices for which the experts have capacity, bool [T, E]."""
        if self.case.capacity_of == "rank":
            return apply_capacity(self.case, weights_TE, chosen_TE, self._tokens(self.at))
        holders = self.mesh.axis("tp_cp")
        numbers_RT = torch.stack([self._tokens(coordinates(self.case, rank)) for rank in holders.ranks])
        return taken_of_all(self.case, weights_TE, chosen_TE, numbers_RT, holders)

    def _tokens(self, at: Coordinates) -> Tensor:
        """The numbers of the tokens of the rank at these coordinates, in the order of its flat hidden states."""
        return self._by_row(tokens_of(self.case, at, *self.draw)).flatten()

    def _by_row(self, x: Tensor) -> Tensor:
        """Swap the first two dims if hidden states have the sequence first."""
        return x.transpose(0, 1) if self.sequence_dim == 0 else x

    def _sent_by(self, step: int, micro: int, rank: int) -> tuple[int, ...]:
        return rows_sent(self.case, self.block, step, micro, rank)


def blocks_of(rank: Rank) -> dict[str, ExpertBlock]:
    """The blocks of a rank, by their dotted names."""
    named = (pair for _, chunk in rank.chunks for pair in chunk.named_modules())
    return {name: block for name, block in named if isinstance(block, ExpertBlock)}
