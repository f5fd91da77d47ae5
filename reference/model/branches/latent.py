"""Latent attention, dense (`reference.features.latent`): queries, keys and values from short vectors of a token.

Letters: B, S, H as in `reference.model.layers`, N heads, L latent. n and r are the plain and the rotary features of a
query and a key, v those of a value.

    q_BSN(n+r) = wuq norm(wdq x), or wq x        [latent_BSL | turned_BSr] = wdkv x
    [k_BSNn | v_BSNv] = wukv norm(latent)        key = [k | rope(turned), the same for all heads]

Scores are divided by sqrt(n + r). Source: arXiv:2405.04434, equations 9-19.
"""

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.model.decoder import Pass


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Its parameters, in the order in which they are used."""
    heads, hidden, latent, queries = case.heads, case.hidden, case.kv_lora_rank, case.q_lora_rank
    linears = {
        **({"wdq": (queries, hidden)} if queries else {"wq": (heads * case.head_dim, hidden)}),
        "wdkv": (latent + case.rotated_dim, hidden),
        **({"q_latent_norm": (queries,), "wuq": (heads * case.head_dim, queries)} if queries else {}),
        "kv_latent_norm": (latent,),
        "wukv": (heads * (case.qk_head_dim + case.value_dim), latent),
        "wo": (hidden, heads * case.value_dim),
    }
    found: dict[str, tuple[int, ...]] = {}
    for leaf, shape in linears.items():
        biased = case.norm == "layernorm" if leaf.endswith("norm") else case.bias
        found |= {f"attention.{leaf}.weight": shape, **({f"attention.{leaf}.bias": shape[:1]} if biased else {})}
    return found


def forward(run: Pass, layer: str, x_BSH: Tensor, visible_SS: Tensor) -> Tensor:
    """The attention of this layer."""
    case, name = run.case, f"{layer}.attention"
    if case.q_lora_rank:
        latent_BSL = run.norm(f"{name}.q_latent_norm", run.linear(f"{name}.wdq", x_BSH))
        q_BSE = run.linear(f"{name}.wuq", latent_BSL)
    else:
        q_BSE = run.linear(f"{name}.wq", x_BSH)
    plain_BSNn, turned_BSNr = q_BSE.unflatten(-1, (case.heads, -1)).split((case.qk_head_dim, case.qk_rope_dim), -1)
    q_BSND = torch.cat((plain_BSNn, run.arithmetic.rotate("q", turned_BSNr, run.batch.positions)), -1)
    latent_BSL, turned_BSr = run.linear(f"{name}.wdkv", x_BSH).split((case.kv_lora_rank, case.qk_rope_dim), -1)
    kv_BSE = run.linear(f"{name}.wukv", run.norm(f"{name}.kv_latent_norm", latent_BSL))
    k_BSNn, v_BSNv = kv_BSE.unflatten(-1, (case.heads, -1)).split((case.qk_head_dim, case.v_head_dim), -1)
    turned_BS1r = run.arithmetic.rotate("k", turned_BSr[:, :, None], run.batch.positions)
    k_BSND = torch.cat((k_BSNn, turned_BS1r.expand(-1, -1, case.heads, -1)), -1)
    return run.linear(f"{name}.wo", run.core(name, q_BSND, k_BSND, v_BSNv, visible_SS))
