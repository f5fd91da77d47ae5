"""autotp: DeepSpeed's automatic tensor parallelism. Hidden states [B, S, D] are whole on every rank of the axis tp, and
shares of heads and features may differ between ranks.

    tensor                             | layout            | forward    | backward   | bytes
    layers.*.attention.{wqkv,wq,wk,wv} | whole -> heads    | -          | all_reduce | A
    layers.*.attention.wo              | partial -> whole  | all_reduce | -          | A
    layers.*.mlp.{w1,w3,w13}           | whole -> features | -          | all_reduce | A
    layers.*.mlp.w2                    | partial -> whole  | all_reduce | -          | A
    head head=gather tied=false        | whole -> vocab    | -          | all_reduce | A
    head head=gather tied=false        | vocab -> whole    | all_gather | -          | U
    head head=sum                      | whole -> columns  | -          | all_reduce | A
    head head=sum                      | partial -> whole  | all_reduce | -          | v
    head head=sum tied=true            | whole -> columns  | -          | all_reduce | K
    step dp                            | all gradients     | -          | all_reduce | G
    step tp qk_norm=true               | partial -> whole  | -          | all_reduce | P
    step dp                            | loss, tokens      | -          | all_reduce | 16
    step tp                            | squared norm      | -          | all_reduce | W

Bytes of: v the logits; U the logits with every rank's part as wide as the widest; K the token table. The embedding is
whole and issues nothing, nor does a tied head that is gathered: it is whole too. The loss is the plain one of whole
logits. Gradients of q/k norms are sums over this rank's heads, added up once a step (DeepSpeed: in every micro-batch).
Forward under head=sum is DeepSpeed's inference; head=gather is its training.
Source: DeepSpeed 0.19.8 `module_inject/auto_tp.py`, `layers.py`, `tp_shard.py` (modes.md 8.2, experts.md 27).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from parallel import autotp, tensor
from parallel.expectation import (
    ITEM_BYTES,
    Term,
    activation_terms,
    delivery_terms,
    per_micro,
    step_terms,
)
from parallel.roles import column_linears, row_linears
from parallel.slicing.held import widths
from parallel.strategy import Strategy
from reference.case import Case

__all__ = ["AUTOTP"]

_SEQUENCE_DIM = 1


def _expected(case: Case) -> Iterator[Term]:
    """Per micro-batch with C column linears a layer: forward 2L all-reduces of A and one call of the head, unless that
    is whole; backward C*L and the head's; recompute 2L."""
    yield from delivery_terms(case)
    for linear in row_linears(case):
        yield from activation_terms(case, "forward", linear, "all_reduce")
        if case.recompute == "full":
            yield from activation_terms(case, "recompute", linear, "all_reduce")
    for linear in column_linears(case):
        yield from activation_terms(case, "backward", linear, "all_reduce", hidden=case.overlap)
    yield from _head_terms(case)


def _head_terms(case: Case) -> Iterator[Term]:
    item = ITEM_BYTES[case.dtype]
    if case.head == "sum":
        yield from per_micro(case, "forward", "head", "all_reduce", case.tokens * case.vocab * item)
        yield from activation_terms(case, "backward", "head", "all_reduce")
        if case.tied:
            yield from per_micro(case, "backward", "head", "all_reduce", case.vocab * case.hidden * item)
    elif not case.tied:
        widest = max(widths(autotp.head_held(case)))
        yield from per_micro(case, "forward", "head", "all_gather", case.tokens * case.tp * widest * item)
        yield from activation_terms(case, "backward", "head", "all_reduce", hidden=case.overlap)


def _partial(case: Case, name: str) -> bool:
    return tensor.head_partial(name)


AUTOTP = Strategy(
    name="autotp",
    sequence_dim=_SEQUENCE_DIM,
    placements=autotp.placements,
    activation=autotp.activation,
    partial=_partial,
    parts=partial(autotp.parts, sequence_dim=_SEQUENCE_DIM),
    expected=_expected,
    once=step_terms(autotp.placements, _partial),
)
