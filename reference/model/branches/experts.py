"""Experts in the place of an MLP: a loop over them, each on the tokens that are its own.

Letters: B rows, S tokens of a row, H hidden, E experts, T tokens of an expert. An expert is an MLP without biases; its
inner features are multiplied by the weight that the router gives it for the token, and the outputs of a token's experts
add up. The shared expert is a plain MLP beside them. Source: Megatron-Core 0.16.1 `TopKRouter`, `SequentialMLP`,
`SharedExpertMLP` (experts.md 21).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.case import Case
from reference.data.routing import first_token, forced
from reference.model.branches import Forward

__all__ = ["chosen", "forward", "shapes", "weights_of"]


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """The parameters; those of all experts are one tensor each, [experts, out, in]."""
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


def forward(run: Forward, layer: str, x_BSH: Tensor, _visible_SS: Tensor) -> Tensor:
    """What the chosen experts of every token return, weighed, and the shared expert."""
    case, name = run.case, f"{layer}.mlp"
    dtype = x_BSH.dtype if case.router_dtype == "model" else getattr(torch, case.router_dtype)
    dtype = torch.promote_types(x_BSH.dtype, dtype)
    router = run.weights[f"{name}.router.weight"].to(dtype)
    logits_BSE = run.told(f"{name}.router", run.arithmetic.linear(x_BSH.to(dtype), router, None))
    if case.routing == "learned":
        chosen_BSE = chosen(case, logits_BSE.detach())
    else:
        first = first_token(case, run.batch.step, *divmod_number(case, run.batch.number))
        tokens_BS = first + torch.arange(case.tokens).view(x_BSH.shape[:2])
        chosen_BSE = forced(case, case.blocks[layer], tokens_BS).to(x_BSH.device)
    run.beside.counts[f"routing/{name}"] = chosen_BSE.int()
    weights_BSE = weights_of(case, logits_BSE, chosen_BSE).to(x_BSH.dtype)
    y_BSH = torch.zeros_like(x_BSH)
    for expert in range(case.experts):
        own = chosen_BSE[..., expert].nonzero(as_tuple=True)
        y_BSH = y_BSH.index_put(own, _expert(run, name, expert, x_BSH[own], weights_BSE[own][:, expert]), True)
    if case.shared_ffn:
        shared_BSH = _shared(run, f"{name}.shared", x_BSH)
        if case.shared_gate:
            gate = run.arithmetic.linear(x_BSH, run.weights[f"{name}.shared_gate.weight"], None)
            shared_BSH = shared_BSH * gate.sigmoid()
        y_BSH = y_BSH + shared_BSH
    return y_BSH


def divmod_number(case: Case, number: int) -> tuple[int, int]:
    """(micro-batch of its data rank, data rank) of micro-batch `number` of a step."""
    return divmod(number, case.dp)


def chosen(case: Case, logits_BSE: Tensor) -> Tensor:
    """The experts of every token: bool [B, S, E]; of equal scores the one with the smaller number."""
    order = logits_BSE.sort(dim=-1, descending=True, stable=True).indices[..., : case.top_k]
    return torch.zeros_like(logits_BSE, dtype=torch.bool).scatter(-1, order, True)


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


def _expert(run: Forward, name: str, expert: int, x_TH: Tensor, weights_T: Tensor) -> Tensor:
    def linear(leaf: str, x: Tensor) -> Tensor:
        y: Tensor = run.arithmetic.linear(x, run.weights[f"{name}.experts.{leaf}.weight"][expert], None)
        return y

    gate = linear("gate", x_TH) if run.case.activation == "swiglu" else None
    inner = run.arithmetic.activate(run.case.activation, linear("up", x_TH), gate)
    return linear("down", inner * weights_T[:, None])


def _shared(run: Forward, name: str, x_BSH: Tensor) -> Tensor:
    first = run.linear(f"{name}.w1", x_BSH)
    if run.case.activation == "swiglu":
        inner = run.arithmetic.activate("swiglu", run.linear(f"{name}.w3", x_BSH), first)
    else:
        inner = run.arithmetic.activate(run.case.activation, first, None)
    return run.linear(f"{name}.w2", inner)
