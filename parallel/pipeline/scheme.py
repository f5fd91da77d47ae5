"""Pipeline parallelism as a scheme: what the words `pp schedule chunks group first_layers last_layers` replace.

A rank builds and fills what its stages hold. The last stage has loss and number of tokens, the others 0, and both are
summed over the pipeline; so is the squared norm, in which a tied token table counts on the first stage alone. Its
gradient is summed over the first and the last stage once a step, after the sums over data ranks (around.md 18.2), so
that both copies take the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parallel.communication import gradients as sync
from parallel.communication.expectation import ACTIVATION, STAGES, CallRow
from parallel.communication.layout import Cut, Placement
from parallel.model.strategy import Rank, Step, Strategy
from parallel.pipeline.execution import as_scheduled, with_channels
from parallel.schedules.stages import TABLE, Stage, held
from reference.case import Case
from reference.language.modes import MODES


def applied(strategy: Strategy, case: Case) -> Strategy:
    """The strategy on the stages of this case's pipeline; itself on one stage."""
    if not case.pipeline_axes:
        return strategy

    def placements(case: Case) -> dict[str, Placement]:
        ranks = [held(case, rank) for rank in range(case.pp)]
        return {name: _on_stages(place, ranks, name) for name, place in strategy.placements(case).items()}

    def step(case: Case, plain: Step) -> Step:
        before = strategy.step(case, plain)
        return replace(
            before,
            prepare=lambda rank: with_channels(before.prepare(rank)),
            schedule=as_scheduled,
            reductions={**before.reductions, **({"embedding": _over_embedding} if case.tied else {})},
        )

    return replace(
        strategy,
        placements=placements,
        loss_axes=(*strategy.loss_axes, "pp"),
        norm_axes=(*strategy.norm_axes, "pp"),
        rows=(*strategy.rows, *_messages(case)),
        step=step,
    )


def _messages(case: Case) -> Iterator[CallRow]:
    """Activations go on and gradients back, over every border of two stages; split ones each rank's part of them."""
    elements = "slice_tokens // tp * hidden" if MODES[case.mode].sequence else ACTIVATION
    for op, when, why in (
        ("send", "not last", "activations to the next stage"),
        ("recv", "not last", "gradients from the next stage"),
        ("recv", "not first", "activations from the stage before"),
        ("send", "not first", "gradients to the stage before"),
    ):
        yield CallRow(STAGES, "pipeline", op, elements, why, axis="pp", when=when)


def _on_stages(place: Placement, ranks: Sequence[Sequence[Stage]], name: str) -> Placement:
    """A parameter's placement where only some ranks hold it, each of them all that the others' cuts leave."""
    whole = range(place.shape[0])
    parts = tuple((whole,) if any(stage.holds(name) for stage in own) else () for own in ranks)
    return replace(place, cuts=(Cut(axis="pp", held=parts), *place.cuts))


def _over_embedding(rank: Rank) -> None:
    """The sum of the token table's gradient over the first and the last stage."""
    if "embedding" in rank.mesh.axes:
        sync.sum_gradients([rank.step.partial(rank)[TABLE]], rank.mesh.axis("embedding"))
