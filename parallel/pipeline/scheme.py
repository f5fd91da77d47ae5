"""Pipeline parallelism as a scheme: what the words `pp schedule first_layers last_layers` replace of a strategy.

A stage builds and fills what it holds. The last stage has loss and number of tokens, the others 0, and both are summed
over the stages; so is the squared norm, in which a tied token table counts on the first stage alone. Its gradient is
summed over the first and the last stage once a step, after the sums over data ranks (around.md 18.2), so that both
copies take the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from parallel import gradients as sync
from parallel.expectation import Term
from parallel.layers.norm import wide
from parallel.layout import Cut, Placement
from parallel.mesh import Mesh
from parallel.pipeline.execution import as_scheduled
from parallel.pipeline.terms import TABLE, micro_batch_terms, once_a_step
from parallel.schedules.stages import stage_of, stages
from parallel.strategy import Parts, Rank, Step, Strategy
from reference.case import Case
from reference.model.parameters import dtype_of

__all__ = ["with_pipeline"]


def with_pipeline(strategy: Strategy, case: Case) -> Strategy:
    """The strategy on the stages of this case's pipeline; itself on one stage."""
    if case.pp == 1:
        return strategy

    def placements(case: Case) -> dict[str, Placement]:
        return {name: _on_stages(place, case, name) for name, place in strategy.placements(case).items()}

    def parts(case: Case, mesh: Mesh, device: torch.device) -> Parts:
        return replace(strategy.parts(case, mesh, device), stage=stage_of(case, mesh.axis("pp").rank))

    def expected(case: Case) -> Iterator[Term]:
        return micro_batch_terms(strategy, case)

    def step(case: Case, plain: Step) -> Step:
        before = strategy.step(case, plain)
        reductions = {**before.reductions, **({"embedding": _over_embedding} if case.tied else {})}
        return replace(before, schedule=as_scheduled, reductions=reductions, norm=_norm)

    return replace(
        strategy,
        placements=placements,
        parts=parts,
        loss_axes=(*strategy.loss_axes, "pp"),
        expected=expected,
        once=once_a_step(strategy),
        step=step,
    )


def _on_stages(place: Placement, case: Case, name: str) -> Placement:
    """A parameter's placement where only some stages hold it, each of them all that the others' cuts leave."""
    whole = range(place.shape[0])
    held = tuple((whole,) if stage.holds(name) else () for stage in stages(case))
    return replace(place, cuts=(Cut(axis="pp", held=held), *place.cuts))


def _over_embedding(rank: Rank) -> None:
    """The sum of the token table's gradient over the first and the last stage."""
    if "embedding" in rank.mesh.axes:
        sync.sum_gradients([rank.gradients()[TABLE]], rank.mesh.axis("embedding"))


def _norm(rank: Rank) -> Tensor:
    """The norm over the weight axis and the stages."""
    axes = [rank.mesh.axis(axis) for axis in (rank.strategy.weight_axis, "pp")]
    gradients = rank.gradients()
    if rank.parts.stage is not None and rank.parts.stage.copies_table:
        del gradients[TABLE]  # it counts on the first stage
    return sync.norm(gradients, rank.updated_places, axes, wide(dtype_of(rank.case)))
