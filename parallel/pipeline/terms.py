"""The closed form of a pipeline: the calls of every stage, at its rank's coordinate.

Per micro-batch, with A bytes of one activation (under tp-sp of this rank's part of the sequence):

    every stage but the last    send A (activation), recv A (gradient)
    every stage but the first   recv A (activation), send A (gradient)
    first stage                 broadcasts of tokens, attention mask and positions over tp
    last stage                  broadcasts of labels, loss mask and attention mask over tp; the loss
    layers, embedding, head     as without stages, on the stage that holds them

A rank has the calls of all its chunks. Once a step, each rank for the parameters that it holds: gradients over the data
ranks, partial ones over tp (`parallel.communication.expectation.step_terms`). Then the token table's gradient over the
first and the last stage (tied=true), loss and tokens over the data ranks and the pipeline, the squared norm over tp and
the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from parallel.communication.expectation import (
    ITEM_BYTES,
    CompleteTerm,
    Terms,
    delivery_terms,
    loss_dtype,
    per_step,
    placed,
)
from parallel.communication.layout import local_shape
from parallel.communication.mesh import coordinates
from parallel.model.strategy import Strategy
from parallel.schedules.stages import TABLE, Stage, stages
from reference.case import Case
from reference.case.modes import MODES

__all__ = ["micro_batch_terms", "once_a_step"]


def micro_batch_terms(strategy: Strategy, case: Case) -> Iterator[CompleteTerm]:
    """The calls of a strategy's micro-batches, each at the stage that holds its module, and the messages."""
    every = stages(case)
    for term in strategy.expected(case):
        if term.phase != "data":
            holder = every[-1] if term.phase == "loss" else next(stage for stage in every if stage.holds(term.region))
            yield from placed([term], holder.at)
    for stage in every:
        yield from placed(delivery_terms(case, stage=stage), stage.at)
        yield from _messages(case, stage)


def _messages(case: Case, stage: Stage) -> Iterator[CompleteTerm]:
    """Activations go on and gradients back, over every border of two stages."""
    split = case.tp if MODES[case.mode].sequence else 1
    for op in ("send", "recv"):
        for border in (not stage.first, not stage.last):
            if border:
                yield CompleteTerm(
                    phase="pipeline",
                    region="",
                    op=op,
                    reduce_op="",
                    axis="pp",
                    group_size=case.pp,
                    dtype=case.dtype,
                    payload_bytes=case.slice_tokens // split * case.hidden * ITEM_BYTES[case.dtype],
                    calls=case.steps * case.micro,
                    at=stage.at,
                )


def once_a_step(strategy: Strategy) -> Mapping[str, Terms]:
    """The parts of the closed form of a step that a pipeline adds or changes."""

    def embedding(case: Case) -> Iterator[CompleteTerm]:
        shape = local_shape(strategy.placements(case)[TABLE], coordinates(case, 0))
        for stage in stages(case):
            if stage.shares_table:
                yield CompleteTerm(
                    phase="grad_sync",
                    region="",
                    op="all_reduce",
                    reduce_op="sum",
                    axis="embedding",
                    group_size=2,
                    dtype=case.dtype,
                    payload_bytes=ITEM_BYTES[case.dtype] * math.prod(shape),
                    calls=case.steps,
                    at=stage.at,
                )

    def scalars(case: Case) -> Iterator[CompleteTerm]:
        for axis in (*strategy.loss_axes, "pp"):
            yield from per_step(case, "all_reduce", 2 * ITEM_BYTES["float64"], axis=axis, dtype="float64")

    def norm(case: Case) -> Iterator[CompleteTerm]:
        dtype = loss_dtype(case)
        for axis in (strategy.weight_axis, "pp"):
            yield from per_step(case, "all_reduce", ITEM_BYTES[dtype], axis=axis, dtype=dtype)

    return {"embedding": embedding, "scalars": scalars, "norm": norm}
