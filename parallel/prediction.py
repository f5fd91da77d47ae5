"""Prediction of further tokens as a scheme: what `prediction_depth prediction_weight` add to a strategy.

    added to     | what
    behind_head  | the depths, whose losses are attached to the logits
    local        | the micro-batch moved by 1, 2, .. places, before it is sliced
    schedule     | the step's tokens are counted before its first micro-batch, for the factors of the losses
    activation   | the norms of both inputs and their projection, which lie as hidden states do
    rows         | embedding, head and loss once more for every depth, on the last stage; the projections; the counts

Depth k (from 0) predicts the token k + 2 places ahead. Its modules are on the stage with the head.

    hidden states | eh_proj [enorm(e) | hnorm(h)], e the embedding of the tokens k + 1 places ahead   | backward
    whole         | column linear of 2 * hidden features, all-gather of its features                  | own slice
    split         | the same, then own tokens                                                         | all-gather first

The output of eh_proj lies as hidden states do. So at the gather of features every rank has the whole gradient and
takes its own slice of it; a reduce-scatter would add up equal gradients. The layer of a depth is an ordinary
transformer layer. Embedding and head are the model's own, so their gradients are sums over all uses. In a pipeline the
last stage holds a copy of the token table, whose gradients are summed as those of a tied table.

Two tokens are of one document if their positions differ by their distance: positions restart at 0 in every document of
a packed row. Rows are moved before context ranks take their slices, so no
rank needs tokens of a neighbour. Source: Megatron-Core 0.16.1 `MultiTokenPredictionLayer` (experts.md 24.1).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.batch import Delivered
from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.expectation import (
    ACTIVATION,
    ONCE_A_STEP,
    CallPlace,
    CallRow,
    Places,
    in_modules,
)
from shardproof.parallel.communication.layout import Mesh, Placement, local_shape
from shardproof.parallel.communication.schedules import stages
from shardproof.parallel.layers.block import Norm
from shardproof.parallel.layers.linear import ColumnLinear, Region, column_linear
from shardproof.parallel.layers.loss import IGNORED, LOSS, Terms, token_weights
from shardproof.parallel.layers.recompute import checkpoint_unit
from shardproof.parallel.model.strategy import MakesLayer, Parts, Rank, Scheduled, Step, Strategy
from shardproof.parallel.model.transformer import Transformer
from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.model.parameters import dtype_of


def shift_batch(batch: Delivered, places: int) -> Delivered:
    """The batch with the token, label, position and mask that come this many places later in the same document.

    Where that is past the document's end, token, position and mask are 0 and the label is IGNORED.
    """
    inside = _ahead(batch.positions, places, filled=-1) == batch.positions + places

    def of(x_BS: Tensor, filled: int) -> Tensor:
        return _ahead(x_BS, places, filled).masked_fill(~inside, filled)

    return replace(
        batch,
        tokens=of(batch.tokens, 0),
        positions=of(batch.positions, 0),
        labels=of(batch.labels, IGNORED),
        loss_mask=of(batch.loss_mask, 0),
    )


def _ahead(x_BS: Tensor, places: int, filled: int) -> Tensor:
    return functional.pad(x_BS[:, places:], (0, places), value=filled)


def counts(rank: Rank, step: int) -> Tensor:
    """The numbers of tokens that count in a step, on all data ranks: of the main loss and of every depth, float64
    [1 + depths].

    The ranks that read micro-batches count for their data rank; the other ranks of tp receive the numbers.
    """
    case, mesh = rank.case, rank.mesh
    total = torch.zeros(1 + case.prediction_depth, dtype=torch.float64, device=rank.device)
    reads = case.delivery == "local" or mesh.axis("tp").rank == 0
    for micro in range(case.micro) if reads else ():
        read = micro_batch(case, step, micro, mesh.axis("dp").rank, device=rank.device)
        whole = Delivered(tokens=read.tokens, labels=read.labels, loss_mask=read.loss_mask, positions=read.positions)
        every = (whole, *(shift_batch(whole, depth + 1) for depth in range(case.prediction_depth)))
        total += torch.stack([token_weights(one.labels, one.loss_mask).sum() for one in every])
    if case.delivery != "local":
        total = all_reduce(total, mesh.axis("tp"))
    return all_reduce(total, mesh.axis("dp"))


class Projection(ColumnLinear):
    """A column linear whose features are gathered; its output lies as hidden states do."""

    def forward(self, x: Tensor) -> Tensor:
        """[.., .., 2 * hidden] -> hidden states."""
        axis, dim = self.region.axis, self.region.sequence_dim
        y = pairs.gather_from(column_linear(x, self.weight, self.bias, self.region), axis)
        return y if dim is None else pairs.scatter_to_sequence(y, axis, dim=dim)


class Depth(nn.Module):
    """A depth: two norms, the projection of their outputs, a transformer layer, the norm before the head."""

    def __init__(self, norms: Callable[[], Norm], eh_proj: Projection, layer: nn.Module) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.eh_proj, self.layer, self.final_norm = norms(), norms(), eh_proj, layer, norms()

    def forward(self, embedded: Tensor, x: Tensor, batch: Delivered, model: Transformer) -> Tensor:
        """Hidden states of the depth before -> those of this depth, normed for the head."""
        both = torch.cat((self.enorm(embedded), self.hnorm(x)), -1)
        through, case = partial(self._through, batch, model), model.case
        if not (case.layers_again and torch.is_grad_enabled()):
            return through(both)
        return checkpoint_unit(through, both, early_stop=case.early_stop, distribute=None, contexts=model.contexts)

    def _through(self, batch: Delivered, model: Transformer, both: Tensor) -> Tensor:
        x = self.eh_proj(both)
        y: Tensor = self.final_norm(self.layer(x, model.rotary(batch, x.dtype), batch.attention_mask, batch.draw))
        return y


class Depths(nn.Module):
    """All depths. `factors` [depths] multiply their summed losses in this step."""

    def __init__(
        self,
        depths: list[Depth],
        loss: Callable[[Tensor, Tensor], Tensor],
        laid_out: Callable[[Tensor], Tensor],
        terms: Terms,
    ) -> None:
        super().__init__()
        for number, depth in enumerate(depths):
            self.add_module(str(number), depth)
        self.loss, self.laid_out, self.terms = loss, laid_out, terms
        self.factors: Tensor | None = None

    def forward(self, logits: Tensor, x: Tensor, batch: Delivered, model: Transformer) -> Tensor:
        """The logits, to which the losses of all depths are attached; `x` are the decoder's normed hidden states."""
        assert self.factors is not None and model.embedding is not None
        total = torch.zeros((), dtype=self.factors.dtype, device=logits.device)
        for number, (factor, ahead) in enumerate(zip(self.factors, batch.ahead, strict=True)):
            embedded = model.embedding(ahead.tokens, ahead.positions)
            embedded = model.dropout.hidden(embedded, f"prediction.{number}.embedding", batch.draw)
            x = self.get_submodule(str(number))(embedded, x, batch, model)
            labels = self.laid_out(ahead.labels)
            losses = self.loss(model.logits(x), labels)
            weights = token_weights(labels, self.laid_out(ahead.loss_mask)).to(losses.dtype)
            total = total + factor * (losses * weights).sum()
        return self.terms.attach(logits, total)


AFTER = ("context", "latent", "pipeline")
_BESIDE = ("enorm", "hnorm", "eh_proj", "embedding")
"""Parts of a depth, beside its layer and last norm, whose output lies as hidden states do."""
_EVERY_DEPTH = " * prediction_depth"


def apply(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the depths of this case behind its head; unchanged without any."""
    if not case.prediction_depth:
        return strategy

    def activation(case: Case, module: str) -> Placement | None:
        parts = module.split(".")
        beside = parts[0] == "prediction" and len(parts) == 3 and parts[2] in _BESIDE
        return strategy.activation(case, "embedding" if beside else module)

    def step(case: Case, plain: Step) -> Step:
        before = strategy.step(case, plain)

        def schedule(rank: Rank, number: int) -> Scheduled:
            _weigh(rank, number)
            return before.schedule(rank, number)

        return replace(before, schedule=schedule)

    rows = (*strategy.rows, *_rows(strategy, case))
    return replace(strategy, parts=partial(_parts, strategy), activation=activation, rows=rows, step=step)


def _parts(strategy: Strategy, case: Case, mesh: Mesh, device: torch.device) -> Parts:
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
        both = batch.tokens.numel() and batch.labels.numel()  # only the stage that predicts gets both
        ahead = [shift_batch(batch, depth + 1) for depth in range(case.prediction_depth)] if both else []
        return replace(parts.local(batch), ahead=tuple(parts.local(one) for one in ahead))

    return replace(parts, behind_head={**parts.behind_head, "prediction": depths}, local=local)


def _weigh(rank: Rank, step: int) -> None:
    """Set the factors of the depths' losses on the last stage, from the numbers of tokens that count.

    Depth k has the factor weight / D * N / N_k, because the step divides by N.
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
    formula, why = "1 + prediction_depth", "tokens of the step that count, of every depth"
    for axis, when in (("tp", 'delivery != "local"'), ("dp", "True")):
        once: dict[str, Any] = {"axis": axis, "dtype": "float64", "times": ONCE_A_STEP, "when": when}
        yield CallRow(_on_last(""), "data", "all_reduce", formula, why, **once)
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
