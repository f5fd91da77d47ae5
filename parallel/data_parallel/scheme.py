"""Data parallelism as a scheme: what the words `zero bucket shard grad_dtype master scaler` replace of a strategy.

Without any of them a strategy is left as it is: one flat sum of all gradients (`parallel.step`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from parallel import gradients as sync
from parallel.data_parallel.buffers import Buckets
from parallel.data_parallel.gathered import Shards
from parallel.data_parallel.scaling import LossScaling
from parallel.data_parallel.terms import data_parallel_terms, once_a_step
from parallel.data_parallel.words import sharing_axes
from parallel.expectation import Term
from parallel.layers.norm import wide
from parallel.step import over_weights
from parallel.strategy import Rank, Step, Strategy
from reference.case import Case
from reference.case.data_parallel import WORDS
from reference.model.parameters import dtype_of

__all__ = ["with_data_parallelism"]


def with_data_parallelism(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the gradients and the optimizer of this case's data parallelism; itself without any word."""
    if all(getattr(case, word) == plain for word, plain in WORDS.items()):
        return strategy

    def expected(case: Case) -> Iterator[Term]:
        yield from strategy.expected(case)
        yield from data_parallel_terms(strategy, case)

    def step(case: Case, plain: Step) -> Step:
        return _step(case, strategy.step(case, plain))

    return replace(strategy, expected=expected, once=once_a_step(strategy), step=step)


def _step(case: Case, plain: Step) -> Step:
    held = Shards(case) if case.zero >= 2 else Buckets(case)
    reductions = {
        "data": held.reduce,
        "partial": lambda rank: over_weights(rank, held.gradients()),
        "trained": held.hand_over,
    }
    return replace(
        plain,
        loss_scale=None if case.scaler == "none" else LossScaling(case),
        prepare=held.prepare,
        reductions=reductions,
        norm=_norm if case.zero else plain.norm,
        afterwards=held.afterwards,
    )


def _norm(rank: Rank) -> Tensor:
    """The norm over the weight axis and the ranks that share the gradients."""
    axes = [rank.mesh.axis(axis) for axis in sharing_axes(rank.case, rank.strategy.weight_axis)]
    return sync.norm(rank.gradients(), rank.updated_places, axes, wide(dtype_of(rank.case)))
