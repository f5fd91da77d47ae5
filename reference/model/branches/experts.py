"""Experts in place of an MLP: a loop over them, each on its own tokens.

Letters: B rows, S tokens of a row, H hidden, E experts, T tokens of an expert. An expert is an MLP without biases,
whose inner features are multiplied by the router's weight for the token. The outputs of a token's experts add up. The
shared expert is a plain MLP beside them. Source: Megatron-Core 0.16.1 `TopKRouter`, `SequentialMLP`, `SharedExpertMLP`
(experts.md 21).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import Batch
from shardproof.reference.data.routing import EQUAL_DIGITS, first_token, forced_experts
from shardproof.reference.model.decoder import Pass


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """The parameters. Those of all experts are one tensor each, [experts, out, in]."""
    count, hidden, width = case.experts, case.hidden, case.expert_width
    up = ("gate", "up") if case.activation == "swiglu" else ("up",)
    found: dict[str, tuple[int, ...]] = {"mlp.router.weight": (count, hidden)}
    found |= {f"mlp.experts.{name}.weight": (count, width, hidden) for name in up}
    found["mlp.experts.down.weight"] = (count, hidden, width)
    if case.shared_ffn:
        linears = {name: (case.shared_ffn, hidden) for name in (("w1", "w3") if len(up) > 1 else ("w1",))}
        for name, shape in (linears | {"w2": (hidden, case.shared_ffn)}).items():
            found[f"mlp.shared.{name}.weight"] = shape
            found |= {f"mlp.shared.{name}.bias": shape[:1]} if case.bias else {}
    if case.shared_gate:
        found["mlp.shared_gate.weight"] = (1, hidden)
    return found


def forward(run: Pass, layer: str, x_BSH: Tensor, _visible_SS: Tensor) -> Tensor:
    """The weighted sum of the outputs of each token's experts, and of the shared expert."""
    case, name = run.case, f"{layer}.mlp"
    dtype = x_BSH.dtype if case.router_dtype == "model" else getattr(torch, case.router_dtype)
    dtype = torch.promote_types(x_BSH.dtype, dtype)
    router = run.weights[f"{name}.router.weight"].to(dtype)
    logits_BSE = run.tap_output(f"{name}.router", run.arithmetic.linear(x_BSH.to(dtype), router, None))
    if case.routing == "learned":
        chosen_BSE = choose_experts(case, logits_BSE.detach(), run.weights.get(_bias(layer)))
    else:
        first = first_token(case, run.batch.step, *divmod_number(case, run.batch.number))
        tokens_BS = first + torch.arange(case.tokens).view(x_BSH.shape[:2])
        chosen_BSE = forced_experts(case, case.blocks[layer], tokens_BS).to(x_BSH.device)
    weights_BSE = weights_of(case, logits_BSE, chosen_BSE)
    counted_BS = run.batch.counted.to(x_BSH.device) if case.balance_of == "counted" else None
    run.beside.losses.extend(losses(case, logits_BSE, chosen_BSE, counted_BS))
    if case.global_loss:
        run.beside.losses.append(global_loss(case, layer, run.batch, logits_BSE))
    if case.capacity:
        chosen_BSE = apply_capacity(case, weights_BSE.detach(), chosen_BSE)
    weights_BSE = (weights_BSE * chosen_BSE).to(x_BSH.dtype)
    run.beside.counts[f"routing/{name}"] = chosen_BSE.int()
    y_BSH = torch.zeros_like(x_BSH)
    for expert in range(case.experts):
        own = chosen_BSE[..., expert].nonzero(as_tuple=True)
        y_BSH = y_BSH.index_put(own, _expert(run, name, expert, x_BSH[own], weights_BSE[own][:, expert]), True)
    if case.shared_ffn:
        shared_BSH = _shared_experts(run, f"{name}.shared", x_BSH)
        if case.shared_gate:
            gate = run.arithmetic.linear(x_BSH, run.weights[f"{name}.shared_gate.weight"], None)
            shared_BSH = shared_BSH * gate.sigmoid()
        y_BSH = y_BSH + shared_BSH
    return y_BSH


def divmod_number(case: Case, number: int) -> tuple[int, int]:
    """(micro-batch of its data rank, data rank) of micro-batch `number` of a step."""
    return divmod(number, case.dp)


def choose_experts(case: Case, logits_BSE: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """The experts of every token: bool [B, S, E]; among equal scores the one with the smaller number.

    With groups, only experts of kept groups are scored: those with the largest sums of their top_k / kept_groups best
    scores.
    """
    score_BSE = logits_BSE.sigmoid() if case.router == "sigmoid" else logits_BSE
    if bias_E is not None:
        score_BSE = score_BSE + bias_E.to(score_BSE.device)
    if case.router_groups > 1:
        score_BSGM = score_BSE.unflatten(-1, (case.router_groups, -1))
        best_BSG = score_BSGM.sort(dim=-1, descending=True).values[..., : case.top_k // case.kept_groups].sum(-1)
        score_BSE = score_BSGM.masked_fill(~_largest(best_BSG, case.kept_groups)[..., None], -math.inf).flatten(-2)
    return _largest(score_BSE, case.top_k)


def _largest(score_E: Tensor, count: int) -> Tensor:
    """A mask of the largest scores along the last dim, the first among equal ones."""
    order = score_E.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(score_E, dtype=torch.bool).scatter(-1, order, True)


def apply_capacity(case: Case, weights_BSE: Tensor, chosen_BSE: Tensor) -> Tensor:
    """The choices without those beyond an expert's capacity. Of equal weights those of the first tokens stay. With
    capacity_of=rank (experts.md 21.3) this is the only place where the dense model knows ranks.
    """
    kept_BSE = torch.zeros_like(chosen_BSE)
    weights_BSE = weights_BSE.round(decimals=EQUAL_DIGITS)
    rank_BSE = weights_BSE if case.drop == "score" else -torch.arange(chosen_BSE[..., 0].numel(), dtype=torch.float64)
    if case.drop == "position":
        rank_BSE = rank_BSE.to(chosen_BSE.device).view(*chosen_BSE.shape[:2], 1).expand(chosen_BSE.shape)
    rank_BSE = rank_BSE.masked_fill(~chosen_BSE, -math.inf)
    whole = [torch.arange(case.row_tokens)]
    for places in _places_of_ranks(case) if case.capacity_of == "rank" else whole:
        rank_TE = rank_BSE[:, places].flatten(0, 1)
        best_TE = _largest(rank_TE.T, case.most_rows).T
        kept_BSE[:, places] = best_TE.view(len(rank_BSE), len(places), -1)
    return kept_BSE & chosen_BSE


def _places_of_ranks(case: Case) -> list[Tensor]:
    """The places of a row whose tokens one rank routes, for every rank that holds a part of it."""
    rows = [[*range(case.row_tokens)]]
    if case.is_sliced:
        rows = [[place for run in runs for place in run] for runs in case.slices]
    size = case.row_tokens // len(rows) // case.tp
    return [torch.tensor(row[first : first + size]) for row in rows for first in range(0, len(row), size)]


def losses(case: Case, logits_BSE: Tensor, chosen_BSE: Tensor, counted_BS: Tensor | None = None) -> list[Tensor]:
    """Balance losses and z-loss of a micro-batch, or of its counted tokens, each times the number of these tokens.

    Like all terms of the loss they are later divided by the counted tokens of the step. With learned routing the
    experts are chosen anew, without groups and bias. With equal scores a balance loss equals its coefficient. Source:
    Switch (arXiv:2101.03961) for any top_k, ST-MoE (2202.08906).
    """
    if not (case.aux_loss or case.sequence_loss or case.z_loss):
        return []
    if counted_BS is not None:
        logits_BSE, chosen_BSE = logits_BSE[counted_BS][None], chosen_BSE[counted_BS][None]
    tokens, factor = logits_BSE[..., 0].numel(), case.experts / case.top_k
    if not tokens:
        return []
    share_BSE = _shares(case, logits_BSE)
    if case.routing == "learned":
        chosen_BSE = _largest(share_BSE.detach(), case.top_k)
    chosen_BSE = chosen_BSE.to(share_BSE.dtype)
    whole = (chosen_BSE.mean((0, 1)) * share_BSE.mean((0, 1))).sum() * factor
    by_row = (chosen_BSE.mean(1) * share_BSE.mean(1)).sum(-1).mean() * factor
    z = logits_BSE.logsumexp(-1).square().mean()
    terms = ((case.aux_loss, whole), (case.sequence_loss, by_row), (case.z_loss, z))
    return [tokens * coefficient * loss for coefficient, loss in terms if coefficient]


def _shares(case: Case, logits_BSE: Tensor) -> Tensor:
    """The score of every expert for each token, which add up to 1."""
    if case.router != "sigmoid":
        return logits_BSE.softmax(-1)
    share_BSE = logits_BSE.sigmoid()
    return share_BSE / (share_BSE.sum(-1, keepdim=True) + 1e-20)


def global_loss(case: Case, layer: str, batch: Batch, logits_BSE: Tensor) -> Tensor:
    """This micro-batch's part of the balance loss of all data ranks: from their forced choices and its own scores."""
    micro, _dp_rank = divmod_number(case, batch.number)
    first = [first_token(case, batch.step, micro, rank) for rank in range(case.dp)]
    tokens_DT = torch.tensor(first)[:, None] + torch.arange(case.tokens)
    chosen_E = forced_experts(case, case.blocks[layer], tokens_DT).double().mean((0, 1)).to(logits_BSE)
    balance = (chosen_E * _shares(case, logits_BSE).mean((0, 1))).sum()
    part: Tensor = case.global_loss * case.tokens * case.experts / case.top_k * balance
    return part


def _bias(layer: str) -> str:
    return f"{layer}.mlp.router.bias"


def values(case: Case) -> dict[str, Tensor]:
    """The biases by which experts are chosen, float64 [E] for every layer: zero at first."""
    names = case.layers_with_experts if case.bias_rate else ()
    return {_bias(layer): torch.zeros(case.experts, dtype=torch.float64) for layer in names}


def update_values(case: Case, values: Mapping[str, Tensor], counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The biases after a step: `bias_rate` more for experts with fewer rows than the mean, less for those with more
    (arXiv:2408.15664).
    """
    rows_E = {name: counts[f"routing/{name.removesuffix('.router.bias')}"].sum((0, 1)).double() for name in values}
    return {
        name: value + case.bias_rate * (rows_E[name].mean() - rows_E[name]).sign().to(value.device)
        for name, value in values.items()
    }


def weights_of(case: Case, logits_BSE: Tensor, chosen_BSE: Tensor) -> Tensor:
    """The weight of every expert for every token, [B, S, E], 0 where it is not chosen."""
    match case.router:
        case "softmax":
            shares = logits_BSE.masked_fill(~chosen_BSE, -math.inf).softmax(-1)
        case "pre-softmax":
            shares = logits_BSE.softmax(-1) * chosen_BSE
        case _:
            shares = logits_BSE.sigmoid() * chosen_BSE
            if case.top_k > 1:
                shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    weights: Tensor = shares * case.router_scale
    return weights


def _expert(run: Pass, name: str, expert: int, x_TH: Tensor, weights_T: Tensor) -> Tensor:
    def linear(leaf: str, x: Tensor) -> Tensor:
        return run.arithmetic.linear(x, run.weights[f"{name}.experts.{leaf}.weight"][expert], None)

    gate = linear("gate", x_TH) if run.case.activation == "swiglu" else None
    inner = run.arithmetic.activate(run.case.activation, linear("up", x_TH), gate)
    return linear("down", run.arithmetic.weigh(inner, weights_T))


def _shared_experts(run: Pass, name: str, x_BSH: Tensor) -> Tensor:
    first = run.linear(f"{name}.w1", x_BSH)
    if run.case.activation == "swiglu":
        inner = run.arithmetic.activate("swiglu", run.linear(f"{name}.w3", x_BSH), first)
    else:
        inner = run.arithmetic.activate(run.case.activation, first, None)
    return run.linear(f"{name}.w2", inner)
