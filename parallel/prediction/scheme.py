"""Prediction of further tokens as a scheme: what `prediction_depth prediction_weight` add to a strategy.

    added to     | what
    behind_head  | the depths, whose losses are attached to the logits
    local        | the micro-batch as tokens see it 1, 2, .. places on, moved before it is sliced
    schedule     | before its first micro-batch: the tokens of the step that count, by which the losses are divided
    activation   | the norms of both inputs and their projection, which lie as hidden states
    rows         | embedding, head and loss once more for every depth, on the last stage; the projections; the counts

Layers and projections are those of every transformer layer and column linear. On several stages the last one holds a
copy of the token table, whose gradients are summed as those of a tied one.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from parallel.communication.batch import Delivered
from parallel.communication.expectation import ACTIVATION, CallPlace, CallRow, Places, in_modules
from parallel.communication.layout import Box, Placement, local_shape
from parallel.communication.mesh import Mesh
from parallel.layers.linear import Region
from parallel.layers.loss import LOSS
from parallel.layers.norm import Norm
from parallel.model.strategy import MakesLayer, Parts, Rank, Step, Strategy
from parallel.prediction.ahead import COUNTS, counts, moved
from parallel.prediction.depths import Depth, Depths, Projection
from parallel.schedules.stages import stages
from reference.case import Case
from reference.model.parameters import dtype_of

AFTER = ("context", "latent", "pipeline")
_BESIDE = ("enorm", "hnorm", "eh_proj", "embedding")
"""Parts of a depth, beside its layer and last norm, whose output lies as hidden states do."""
_EVERY_DEPTH = " * prediction_depth"


def applied(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the depths of this case behind its head; itself without any."""
    if not case.prediction_depth:
        return strategy

    def parts(case: Case, mesh: Mesh, device: torch.device) -> Parts:
        return _parts(case, mesh, device, strategy)

    def activation(case: Case, module: str) -> Placement | None:
        parts = module.split(".")
        beside = parts[0] == "prediction" and len(parts) == 3 and parts[2] in _BESIDE
        return strategy.activation(case, "embedding" if beside else module)

    def step(case: Case, plain: Step) -> Step:
        before = strategy.step(case, plain)

        def schedule(rank: Rank, number: int) -> tuple[Tensor, Tensor, tuple[Box, ...] | None]:
            _weigh(rank, number)
            return before.schedule(rank, number)

        return replace(before, schedule=schedule)

    return replace(
        strategy, parts=parts, activation=activation, rows=(*strategy.rows, *_rows(strategy, case)), step=step
    )


def _parts(case: Case, mesh: Mesh, device: torch.device, strategy: Strategy) -> Parts:
    parts = strategy.parts(case, mesh, device)
    region = Region(
        axis=mesh.axis("tp"), sequence_dim=strategy.sequence_dim if case.system.sequence else None, overlap=case.overlap
    )

    places, dtype = strategy.placements(case), dtype_of(case)

    def norm() -> Norm:
        return Norm(case.hidden, bias=case.norm == "layernorm", dtype=dtype, device=device)

    def depth(name: str, layer: MakesLayer) -> Depth:
        shape = local_shape(places[f"{name}.eh_proj.weight"], mesh.coordinates)
        projection = Projection(shape, region, bias=case.bias, dtype=dtype, device=device)
        return Depth(norm, projection, layer(f"{name}.layer"))

    def depths(layer: MakesLayer) -> nn.Module:
        return Depths([depth(name, layer) for name in _depths(case)], parts.loss, strategy.laid_out, parts.terms)

    def local(batch: Delivered) -> Delivered:
        both = batch.tokens.numel() and batch.labels.numel()  # only the stage that predicts is sent both
        ahead = [moved(batch, depth + 1) for depth in range(case.prediction_depth)] if both else []
        return replace(parts.local(batch), ahead=tuple(parts.local(one) for one in ahead))

    return replace(parts, behind_head={**parts.behind_head, "prediction": depths}, local=local)


def _weigh(rank: Rank, step: int) -> None:
    """Count the tokens of a step where its loss is computed.

    Depth k weighs weight / D * N / N_k, as the step divides by N.
    """
    stage, model = rank.chunks[-1]
    if not stage.last:
        return
    depths = model.get_submodule("prediction")
    assert isinstance(depths, Depths)
    main, further = counts(rank, step).split((1, rank.case.prediction_depth))
    weight = rank.case.prediction_weight / rank.case.prediction_depth
    depths.factors = (weight * main / further).where(further > 0, 0.0)


def _rows(strategy: Strategy, case: Case) -> Iterator[CallRow]:
    yield from COUNTS
    for row in strategy.rows:
        if row.where in ("embedding", "head"):
            yield replace(row, where=_on_last(str(row.where)), times=f"{row.times}{_EVERY_DEPTH}")
    for row in LOSS:
        yield replace(row, where=_on_last("prediction"), phase="forward", times=f"{row.times}{_EVERY_DEPTH}")
    features = CallRow(in_modules(_projections), "forward", "all_gather", ACTIVATION, "features of the projection")
    yield features
    if case.system.sequence:
        yield replace(features, phase="backward", why="gradients of own tokens")


def _on_last(module: str) -> Places:
    """A module on the last stage."""
    return lambda case: [CallPlace(module=module, at=stages(case)[-1].at, values={"last": True})]


def _depths(case: Case) -> Iterator[str]:
    return (f"prediction.{depth}" for depth in range(case.prediction_depth))


def _projections(case: Case) -> Iterator[str]:
    return (f"{depth}.eh_proj" for depth in _depths(case))
