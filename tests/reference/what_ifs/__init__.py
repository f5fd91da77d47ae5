"""What-ifs of the dense model: their tensors, and what they are held against."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardproof.reference.case import Case
from shardproof.reference.model.parameters import full
from shardproof.reference.training import subject as dense
from shardproof.reference.what_ifs.rules import what_ifs

CPU = torch.device("cpu")
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


def broken(case: Case, *ids: str, **given: Any) -> dict[str, Tensor]:
    """Tensors when these rules are not kept, all by default: "<id>.<reading>/<name>" -> tensor."""
    return {
        f"{rule.id}{'.' * bool(reading)}{reading}/{name}": tensor
        for rule in what_ifs()
        if not ids or rule.id in ids
        for reading, tensors in rule.readings(case, CPU, **given).items()
        for name, tensor in tensors.items()
    }


def weight(case: Case, name: str) -> Tensor:
    return full(case, name).double()


def through(case: Case, leaf: str, x: Tensor) -> Tensor:
    """The output of a biased linear of the first layer."""
    return functional.linear(x, *(weight(case, f"layers.0.{leaf}.{kind}") for kind in ("weight", "bias")))


def projected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [B, S, heads, D] of separate projections before rotation."""
    acts = dense.true_activations(case, CPU)
    q, k, v = (acts[f"act/layers.0.attention.{leaf}"].unflatten(-1, (-1, case.head_dim)) for leaf in ("wq", "wk", "wv"))
    return q, k, v


def attended(
    case: Case, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, seen: Tensor | None = None
) -> Tensor:
    """The output of attention by torch's own core; causal unless `seen` says what is visible."""
    group = case.heads // case.kv_heads
    k, v = (x.repeat_interleave(group, 2) if x.shape[2] == case.kv_heads else x for x in (k, v))
    mask = torch.ones(case.seq, case.seq, dtype=torch.bool).tril() if seen is None else seen
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    context = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return through(case, "attention.wo", context.transpose(1, 2).flatten(2))
