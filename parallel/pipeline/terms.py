"""The closed form of a pipeline: the calls of every stage, at its coordinate.

Per micro-batch, with A bytes of one activation (under tp-sp of this rank's part of the sequence):

    every stage but the last    send A (activation), recv A (gradient)
    every stage but the first   recv A (activation), send A (gradient)
    first stage                 broadcasts of tokens, attention mask and positions over tp
    last stage                  broadcasts of labels, loss mask and attention mask over tp; the loss
    layers, embedding, head     as without stages, on the stage that holds them

Once a step, each stage for the parameters that it holds: gradients over the data ranks, partial ones over tp. Then
the token table's gradient over the first and the last stage (tied=true), loss and tokens over the data ranks and the
stages, the squared norm over tp and the stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from parallel.expectation import ITEM_BYTES, Term, Terms, delivery_terms, loss_dtype, per_step
from parallel.layout import Placement, local_shape
from parallel.mesh import coordinates
from parallel.schedules.stages import Stage, stages
from parallel.strategy import Strategy
from reference.case import Case
from reference.case.modes import MODES

__all__ = ["TABLE", "micro_batch_terms", "once_a_step"]

TABLE = "embedding.tokens.weight"
"""The parameter that the first and the last stage hold when embeddings are tied."""


def micro_batch_terms(strategy: Strategy, case: Case) -> Iterator[Term]:
    """The calls of a strategy's micro-batches, each at the stage that holds its module, and the messages."""
    every = stages(case)
    for term in strategy.expected(case):
        if term.phase != "data":
            holder = every[-1] if term.phase == "loss" else next(stage for stage in every if stage.holds(term.region))
            yield _at(holder, term)
    for stage in every:
        for term in delivery_terms(case, stage=stage):
            yield _at(stage, term)
        yield from _messages(case, stage)


def _messages(case: Case, stage: Stage) -> Iterator[Term]:
    """Activations go on and gradients back, over every border of two stages."""
    split = case.tp if MODES[case.mode].sequence else 1
    for op in ("send", "recv"):
        for border in (not stage.first, not stage.last):
            if border:
                yield Term(
                    phase="pipeline",
                    region="",
                    op=op,
                    reduce_op="",
                    axis="pp",
                    group_size=case.pp,
                    dtype=case.dtype,
                    payload_bytes=case.slice_tokens // split * case.hidden * ITEM_BYTES[case.dtype],
                    calls=case.steps * case.micro,
                    at={"pp": stage.index},
                )


def once_a_step(strategy: Strategy) -> Mapping[str, Terms]:
    """The parts of the closed form of a step, stage by stage."""

    def data(case: Case) -> Iterator[Term]:
        for stage in stages(case):
            elements = sum(_elements(place, case, stage) for place in _held(strategy, case, stage).values())
            for axis in strategy.data_axes:
                for term in per_step(case, "all_reduce", ITEM_BYTES[case.dtype] * elements, axis=axis):
                    yield _at(stage, term)

    def partials(case: Case) -> Iterator[Term]:
        for stage in stages(case):
            places = _held(strategy, case, stage)
            shared = [math.prod(place.shape) for name, place in places.items() if strategy.partial(case, name)]
            if shared:
                size = ITEM_BYTES[case.dtype] * sum(shared)
                for term in per_step(case, "all_reduce", size, axis=strategy.weight_axis):
                    yield _at(stage, term)

    def embedding(case: Case) -> Iterator[Term]:
        for stage in stages(case):
            if case.tied and (stage.first or stage.last):
                elements = _elements(strategy.placements(case)[TABLE], case, stage)
                yield Term(
                    phase="grad_sync",
                    region="",
                    op="all_reduce",
                    reduce_op="sum",
                    axis="embedding",
                    group_size=2,
                    dtype=case.dtype,
                    payload_bytes=ITEM_BYTES[case.dtype] * elements,
                    calls=case.steps,
                    at={"pp": stage.index},
                )

    def scalars(case: Case) -> Iterator[Term]:
        for axis in (*strategy.loss_axes, "pp"):
            yield from per_step(case, "all_reduce", 2 * ITEM_BYTES["float64"], axis=axis, dtype="float64")

    def norm(case: Case) -> Iterator[Term]:
        dtype = loss_dtype(case)
        for axis in (strategy.weight_axis, "pp"):
            yield from per_step(case, "all_reduce", ITEM_BYTES[dtype], axis=axis, dtype=dtype)

    return {"data": data, "partial": partials, "embedding": embedding, "scalars": scalars, "norm": norm}


def _at(stage: Stage, term: Term) -> Term:
    return replace(term, at={**term.at, "pp": stage.index})


def _held(strategy: Strategy, case: Case, stage: Stage) -> dict[str, Placement]:
    return {name: place for name, place in strategy.placements(case).items() if stage.holds(name)}


def _elements(place: Placement, case: Case, stage: Stage) -> int:
    """Elements of a parameter's local tensor on this stage, padding included."""
    at = {**coordinates(case, 0), "pp": (stage.index, stage.count)}
    return math.prod(local_shape(place, at))
