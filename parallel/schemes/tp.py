"""tp: Megatron tensor parallelism. Hidden states [S, B, D] are whole on every rank of the axis tp.

    tensor                                   | layout            | forward      | backward   | bytes
    embedding                                | partial -> whole  | all_reduce   | -          | A
    layers.*.attention.{wqkv,wq,wk,wv}       | whole -> heads    | -            | all_reduce | A
    layers.*.attention.wo                    | partial -> whole  | all_reduce   | -          | A
    layers.*.mlp.{w1,w3,w13}                 | whole -> features | -            | all_reduce | A
    layers.*.mlp.w2                          | partial -> whole  | all_reduce   | -          | A
    head                                     | whole -> vocab    | -            | all_reduce | A
    head head=gather                         | vocab -> whole    | all_gather   | -          | V
    loss head=parallel cross_entropy=unfused | vocab -> whole    | 3 all_reduce | -          | T
    loss head=parallel cross_entropy=fused   | vocab -> whole    | all_reduce   | -          | T
    loss head=parallel cross_entropy=fused   | vocab -> whole    | all_reduce   | -          | 2*T
    step dp                                  | all gradients     | -            | all_reduce | G
    step tp qk_norm=true                     | partial -> whole  | -            | all_reduce | P
    step dp                                  | loss, tokens      | -            | all_reduce | 16
    step tp                                  | squared norm      | -            | all_reduce | W

Label smoothing adds one term to the loss: one more all_reduce of T, or T more bytes in the fused one. Norms, learned
positions and row biases are whole, and so are their gradients; those of q/k norms are sums over this rank's heads.
Source: arXiv:1909.08053; Megatron-Core 0.14 with local layers (modes.md 2, 4.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from parallel.communication.expectation import (
    CompleteTerm,
    activation_terms,
    behind_weights,
    delivery_terms,
    logits_terms,
    repeated,
    saved_terms,
    step_terms,
)
from parallel.layers.roles import column_linears, row_linears
from parallel.model.strategy import Strategy
from parallel.schemes import tensor
from reference.case import Case

__all__ = ["TP"]


def _expected(case: Case) -> Iterator[CompleteTerm]:
    """Per micro-batch: forward 2L+1 all-reduces of A, loss 3, backward C*L+1; recompute 2L."""
    yield from delivery_terms(case)
    yield from activation_terms(case, "forward", "embedding", "all_reduce")
    for linear in row_linears(case):
        yield from repeated(case, activation_terms(case, "forward", linear, "all_reduce"))
    yield from saved_terms(case)
    yield from logits_terms(case)
    for linear in [*column_linears(case), "head"]:
        yield from activation_terms(case, "backward", linear, "all_reduce", hidden=behind_weights(case))


def _partial(case: Case, name: str) -> bool:
    return tensor.head_partial(name)


TP = Strategy(
    name="tp",
    sequence_dim=0,
    placements=tensor.placements,
    activation=partial(tensor.activation, sequence_split=False),
    partial=_partial,
    parts=partial(tensor.parts, sequence_dim=0, sequence_split=False),
    expected=_expected,
    once=step_terms(tensor.placements, _partial),
)
