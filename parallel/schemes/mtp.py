"""mtp: InternEvo's tensor parallelism. Hidden states [B, S, D] are whole on every rank of the axis tp.

    tensor                                   | layout            | forward      | backward   | bytes
    embedding embedding=hidden               | columns -> whole  | all_gather   | -          | A
    embedding embedding=vocab                | partial -> whole  | all_reduce   | -          | A
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
    step tp                                  | partial -> whole  | -            | all_reduce | N
    step dp                                  | loss, tokens      | -            | all_reduce | 16
    step tp                                  | squared norm      | -            | all_reduce | W

Beside `tp` it lays hidden states out as [B, S, D], splits the token table along hidden by default, and sums
partial gradients, which are those of q/k norms, one by one. Label smoothing adds one term to the loss: one more
all_reduce of T, or T more bytes in the fused one. Gathered logits get the plain loss (decision H1).
Source: InternEvo's mtp (modes.md 2, 3.3, 3.4, 3.7).
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

__all__ = ["MTP"]


def _expected(case: Case) -> Iterator[CompleteTerm]:
    """Per micro-batch with C column linears a layer: forward one all-gather of A and 2L all-reduces, loss 3, backward
    C*L+1 all-reduces; recompute 2L. A vocabulary-parallel embedding: one all-reduce for the all-gather."""
    yield from delivery_terms(case)
    yield from activation_terms(
        case, "forward", "embedding", "all_gather" if case.embedding == "hidden" else "all_reduce"
    )
    for linear in row_linears(case):
        yield from repeated(case, activation_terms(case, "forward", linear, "all_reduce"))
    yield from saved_terms(case)
    yield from logits_terms(case)
    for linear in [*column_linears(case), "head"]:
        yield from activation_terms(case, "backward", linear, "all_reduce", hidden=behind_weights(case))


def _partial(case: Case, name: str) -> bool:
    return tensor.head_partial(name)


MTP = Strategy(
    name="mtp",
    sequence_dim=1,
    placements=tensor.placements,
    activation=partial(tensor.activation, sequence_split=False),
    partial=_partial,
    coalesced=False,
    parts=partial(tensor.parts, sequence_dim=1, sequence_split=False),
    expected=_expected,
    once=step_terms(tensor.placements, _partial, coalesced=False),
)
