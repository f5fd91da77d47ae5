"""The plain step, part by part (`parallel.model.strategy.Step`): schemes replace parts of it, the rest is this.

Gradients are of the summed loss of every micro-batch; the global number of tokens divides them once, after all sums.
Logits are [rows, seq, width]; row (data_rank * micro + m) * batch + b, packed data_rank * micro + m.
"""

import torch
from torch import Tensor

from shardproof.parallel.communication import gradients as sync
from shardproof.parallel.communication.batch import deliver
from shardproof.parallel.communication.layout import Box, rows
from shardproof.parallel.layers.block import wide
from shardproof.parallel.layers.loss import counted
from shardproof.parallel.model.strategy import Rank, Scheduled, Step
from shardproof.parallel.schedules.stages import TABLE
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of

LARGEST_LOGITS = 2**24
"""Elements of the full logits of one step above which an outcome leaves them out."""
_WEIGHT_DECAY = 0.01


class MicroBatches:
    """The micro-batches of a rank in a step: the forward of each, and what the last stage sums over them.

    Without a pipeline the one stage is the whole model, the first and the last.
    """

    def __init__(self, rank: Rank, step: int) -> None:
        self.rank, self.step = rank, step
        self.loss = torch.zeros((), dtype=torch.float64, device=rank.device)
        self.tokens = torch.zeros_like(self.loss)
        self._boxes: list[Box] | None = [] if self._keeps_logits() else None

    @property
    def sums(self) -> Scheduled:
        """Loss sum, number of tokens and logits of the micro-batches so far."""
        return self.loss, self.tokens, None if self._boxes is None else tuple(self._boxes)

    def _keeps_logits(self) -> bool:
        rank, case = self.rank, self.rank.case
        small = case.dp * case.micro * case.tokens * case.vocab <= LARGEST_LOGITS
        return rank.proves and rank.chunks[-1][0].last and small

    def forward(self, micro: int, chunk: int = 0, received: Tensor | None = None) -> Tensor:
        """A stage's layers of a micro-batch, and what it sends on; on the last one the summed loss instead."""
        rank, strategy = self.rank, self.rank.strategy
        stage, model = rank.chunks[chunk]
        batch = rank.parts.local(deliver(rank.case, rank.mesh, self.step, micro, rank.device, stage=stage))
        output: Tensor = model(batch, received)
        if not stage.last:
            return output
        labels = strategy.laid_out(batch.labels)
        losses = rank.parts.loss(output, labels)
        weights = counted(labels, strategy.laid_out(batch.loss_mask)).to(losses.dtype)
        summed = (losses * weights).sum()
        self.loss += summed.detach()
        self.tokens += weights.sum()
        if rank.metric is not None:
            with torch.no_grad():
                rank.metric(output, labels, weights)
        if self._boxes is not None:
            self._boxes += self._logits(micro, output.detach())
        return summed if rank.step.loss_scale is None else rank.step.loss_scale.scaled(summed)

    def _logits(self, micro: int, logits: Tensor) -> tuple[Box, ...]:
        rank, case = self.rank, self.rank.case
        place = rank.strategy.activation(case, "head")
        assert place is not None  # every mode states where logits lie
        first = (rank.mesh.axis("dp").rank * case.micro + micro) * case.rows
        boxes = rank.boxes(rank.strategy.laid_out(logits), place)
        return rows(boxes, first=first, total=case.dp * case.micro * case.rows)


def one_after_another(rank: Rank, step: int) -> Scheduled:
    """All micro-batches of a step, each forward and backward: this rank's loss sum, number of tokens and logits."""
    micro_batches = MicroBatches(rank, step)
    for micro in range(rank.case.micro):
        micro_batches.forward(micro).backward()
    return micro_batches.sums


def over_data(rank: Rank) -> None:
    """The sums of all gradients over the data axes, in one flat call each."""
    mesh, gradients = rank.mesh, rank.step.partial(rank)
    for axis in rank.strategy.data_axes:
        sync.sum_gradients(gradients.values(), mesh.axis(axis))


def over_weights(rank: Rank) -> None:
    """The sums over the weight axis of the gradients that are partial there, in one flat call or one each."""
    strategy, gradients = rank.strategy, rank.step.partial(rank)
    weight_axis = rank.mesh.axis(strategy.weight_axis)
    partial = [gradient for name, gradient in gradients.items() if strategy.partial(rank.case, name)]
    for group in [partial] if strategy.coalesced else [[gradient] for gradient in partial]:
        sync.sum_gradients(group, weight_axis)


def total_norm(rank: Rank) -> Tensor:
    """The norm of the full gradients: squares are summed over the weight axis and `Strategy.norm_axes`."""
    axes = [rank.mesh.axis(axis) for axis in (rank.strategy.weight_axis, *rank.strategy.norm_axes)]
    gradients = rank.gradients()
    if rank.chunks[-1][0].copies_table:
        del gradients[TABLE]  # it counts on the first stage
    return sync.norm(gradients, rank.updated_places, axes, wide(dtype_of(rank.case)))


def made_optimizer(case: Case, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """The case's optimizer over these tensors."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=case.lr, weight_decay=_WEIGHT_DECAY)
    return torch.optim.SGD(parameters, lr=case.lr)


def _unchanged(rank: Rank) -> Rank:
    return rank


def _nothing(_rank: Rank) -> None:
    return None


PLAIN = Step(
    prepare=_unchanged,
    schedule=one_after_another,
    reductions={"data": over_data, "partial": over_weights},
    partial=Rank.gradients,
    norm=total_norm,
    optimizer=lambda rank: made_optimizer(rank.case, list(rank.updated.values())),
    afterwards=_nothing,
    beside=lambda _rank, _step: {},
)
"""Every micro-batch after the other, one flat call for the data axes, the case's optimizer over the parameters."""
