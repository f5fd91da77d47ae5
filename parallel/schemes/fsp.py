"""fsp: InternEvo's sequence parallelism that gathers again. Hidden states [B, S, D] are split on S over tp; a column
linear saves its slice of the input, 1/p of what `msp` saves, and gathers it a second time in backward.

    tensor                                      | layout           | forward        | backward                   | bytes
    embedding embedding=hidden                  | columns -> split | all_gather     | all_gather                 | A
    embedding embedding=vocab positions=learned | partial -> split | all_reduce     | all_gather                 | A
    embedding embedding=vocab positions=rope    | partial -> split | reduce_scatter | all_gather                 | A
    layers.*.attention.{wqkv,wq,wk,wv}          | split -> heads   | all_gather     | all_gather, reduce_scatter | A
    layers.*.attention.wo                       | partial -> split | reduce_scatter | all_gather                 | A
    layers.*.mlp.{w1,w3,w13}                    | split -> inner   | all_gather     | all_gather, reduce_scatter | A
    layers.*.mlp.w2                             | partial -> split | reduce_scatter | all_gather                 | A
    head                                        | split -> vocab   | all_gather     | all_gather, reduce_scatter | A
    head head=gather                            | vocab -> whole   | all_gather     | -                          | V
    loss head=parallel cross_entropy=unfused    | vocab -> whole   | 3 all_reduce   | -                          | T
    loss head=parallel cross_entropy=fused      | vocab -> whole   | all_reduce     | -                          | T
    loss head=parallel cross_entropy=fused      | vocab -> whole   | all_reduce     | -                          | 2*T
    step dp                                     | all gradients    | -              | all_reduce                 | G
    step tp                                     | partial -> whole | -              | all_reduce                 | N
    step dp                                     | loss, tokens     | -              | all_reduce                 | 16
    step tp                                     | squared norm     | -              | all_reduce                 | W

Forward is `msp`'s, bit for bit. Every column linear gathers by itself: w1 and w3 send the same tensor twice unless they
are fused. Partial gradients are those of norms, q/k norms and row biases: sums over this rank's tokens (or heads), one
call each, never averaged (decision G1). Learned positions meet the hidden states before the split, so theirs are whole.
Label smoothing adds one term to the loss: one more all_reduce of T, or T more bytes in the fused one.
Source: InternEvo's fsp (modes.md 2, 2.1, 3.3, 3.4, 3.7).
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

__all__ = ["FSP"]


def _expected(case: Case) -> Iterator[CompleteTerm]:
    """Per micro-batch with C column linears a layer: forward C*L+2 all-gathers (one of the embedding), 2L
    reduce-scatters, loss 3; backward (C+2)L+2 all-gathers, C*L+1 reduce-scatters; recompute C*L and 2L."""
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


FSP = Strategy(
    name="fsp",
    sequence_dim=1,
    placements=tensor.placements,
    activation=partial(tensor.activation, sequence_split=True),
    partial=_partial,
    coalesced=False,
    parts=partial(tensor.parts, sequence_dim=1, sequence_split=True),
    expected=_expected,
    once=step_terms(tensor.placements, _partial, coalesced=False),
)
