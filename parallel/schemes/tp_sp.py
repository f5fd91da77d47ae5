"""tp-sp: Megatron tensor parallelism with sequence parallelism. Hidden states [S, B, D] are split on S over tp.

    tensor                                   | layout            | forward        | backward                   | bytes
    embedding positions=learned              | partial -> split  | all_reduce     | all_gather                 | A
    embedding positions=rope                 | partial -> split  | reduce_scatter | all_gather                 | A
    layers.*.attention.{wqkv,wq,wk,wv}       | split -> heads    | all_gather     | all_gather, reduce_scatter | A
    layers.*.attention.wo                    | partial -> split  | reduce_scatter | all_gather                 | A
    layers.*.mlp.{w1,w3,w13}                 | split -> features | all_gather     | all_gather, reduce_scatter | A
    layers.*.mlp.w2                          | partial -> split  | reduce_scatter | all_gather                 | A
    head                                     | split -> vocab    | all_gather     | all_gather, reduce_scatter | A
    head head=gather                         | vocab -> whole    | all_gather     | -                          | V
    loss head=parallel cross_entropy=unfused | vocab -> whole    | 3 all_reduce   | -                          | T
    loss head=parallel cross_entropy=fused   | vocab -> whole    | all_reduce     | -                          | T
    loss head=parallel cross_entropy=fused   | vocab -> whole    | all_reduce     | -                          | 2*T
    step dp                                  | all gradients     | -              | all_reduce                 | G
    step tp                                  | partial -> whole  | -              | all_reduce                 | P
    step dp                                  | loss, tokens      | -              | all_reduce                 | 16
    step tp                                  | squared norm      | -              | all_reduce                 | W

Column linears save their slice of the sequence and gather it again in backward, as Megatron does. The gradients of
norms, row biases and q/k norms are sums over this rank's tokens (or heads); learned positions meet the hidden states
before the split, so theirs are whole. Label smoothing adds one term to the loss: one more all_reduce of T, or T more
bytes in the fused one.
Source: arXiv:2205.05198; Megatron-Core 0.14 with local layers (modes.md 2, 4.3).
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
    split_embedding_terms,
    step_terms,
)
from parallel.layers.roles import column_linears, row_linears
from parallel.model.strategy import Strategy
from parallel.schemes import tensor
from reference.case import Case

__all__ = ["TP_SP"]


def _expected(case: Case) -> Iterator[CompleteTerm]:
    """Per micro-batch with C column linears a layer and rope: forward C*L+1 all-gathers, 2L+1 reduce-scatters, loss 3,
    backward (C+2)L+2 all-gathers, C*L+1 reduce-scatters. Learned positions: one all-reduce for one reduce-scatter."""
    yield from delivery_terms(case)
    yield from split_embedding_terms(case)
    for linear in column_linears(case):
        yield from repeated(case, activation_terms(case, "forward", linear, "all_gather"))
    for linear in row_linears(case):
        yield from repeated(case, activation_terms(case, "forward", linear, "reduce_scatter"))
    yield from activation_terms(case, "forward", "head", "all_gather")
    yield from logits_terms(case)
    for linear in [*column_linears(case), "head"]:
        yield from activation_terms(case, "backward", linear, "all_gather", hidden=case.overlap)
        yield from activation_terms(case, "backward", linear, "reduce_scatter", hidden=behind_weights(case))
    for linear in row_linears(case):
        yield from activation_terms(case, "backward", linear, "all_gather")


def _partial(case: Case, name: str) -> bool:
    return tensor.sequence_partial(name)


TP_SP = Strategy(
    name="tp-sp",
    sequence_dim=0,
    placements=tensor.placements,
    activation=partial(tensor.activation, sequence_split=True),
    partial=_partial,
    parts=partial(tensor.parts, sequence_dim=0, sequence_split=True),
    expected=_expected,
    once=step_terms(tensor.placements, _partial),
)
