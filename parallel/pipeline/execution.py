"""A step on one stage: forwards, backwards and messages in the order of its schedule.

A message is an activation or its gradient, [S, B, D] in the case's dtype, under tp-sp this rank's part of S. Messages
that are issued together are one batch of isend and irecv over the pipeline's group, and all of it is awaited at once.
What is received is an empty tensor that requires a gradient; what is sent back is that gradient.
Source: Megatron-Core 0.16.1 `schedules.py`, `p2p_communication.py` (around.md 13.1, 13.4).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.batch import deliver
from parallel.layers.loss import counted
from parallel.layout import Box, rows
from parallel.schedules.messages import peer, program
from parallel.schedules.pipeline import Action, Kind, Pipeline
from parallel.schedules.stages import Stage, stage_of
from parallel.step import keeps_logits
from parallel.strategy import Rank
from reference.case import Case
from reference.case.modes import MODES
from reference.model.parameters import dtype_of

__all__ = ["as_scheduled", "message_shape", "pipeline_of"]

_RECEIVED = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)


def pipeline_of(case: Case) -> Pipeline:
    """The shape of the case's pipeline, as `parallel.schedules` orders it."""
    return Pipeline(schedule=case.schedule, pp=case.pp, micro=case.micro)


def message_shape(case: Case, *, sequence_dim: int) -> tuple[int, ...]:
    """The shape of one activation on one rank, between two stages."""
    rows, length = (1, case.tokens) if case.packed else (case.batch, case.seq)
    length //= case.cp * (case.tp if MODES[case.mode].sequence else 1)
    return (length, rows, case.hidden) if sequence_dim == 0 else (rows, length, case.hidden)


def as_scheduled(rank: Rank, step: int) -> tuple[Tensor, Tensor, tuple[Box, ...] | None]:
    """All micro-batches of a step in the order of the schedule: loss sum, number of tokens and logits.

    Stages before the last have 0, 0 and None.
    """
    axis = rank.mesh.axis("pp")
    pipeline, run = pipeline_of(rank.case), _Run(rank, step)
    for together in program(pipeline, axis.rank):
        match together[0].kind:
            case Kind.F:
                run.forward(together[0].micro)
            case Kind.B:
                run.backward(together[0].micro)
            case _:
                run.exchange(together, [axis.ranks[peer(pipeline, message)] for message in together])
    return run.loss, run.tokens, tuple(run.boxes) if run.stage.last and keeps_logits(rank) else None


class _Run:
    """One step of one stage: what came in, what went out, and the sums of the last stage."""

    def __init__(self, rank: Rank, step: int) -> None:
        self.rank, self.step = rank, step
        self.stage: Stage = stage_of(rank.case, rank.mesh.axis("pp").rank)
        self.loss = torch.zeros((), dtype=torch.float64, device=rank.device)
        self.tokens = torch.zeros_like(self.loss)
        self.boxes: list[Box] = []
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}

    def forward(self, micro: int) -> None:
        """This stage's layers of a micro-batch; on the last one its loss too."""
        rank = self.rank
        batch = rank.parts.local(deliver(rank.case, rank.mesh, self.step, micro, rank.device, stage=self.stage))
        output = rank.model(batch, self._inputs.get(micro))
        self._outputs[micro] = output
        if not self.stage.last:
            return
        labels = rank.strategy.laid_out(batch.labels)
        losses = rank.parts.loss(output, labels)
        weights = counted(labels, rank.strategy.laid_out(batch.loss_mask)).to(losses.dtype)
        summed = self._outputs[micro] = (losses * weights).sum()
        self.loss += summed.detach()
        self.tokens += weights.sum()
        if keeps_logits(rank):
            self.boxes += self._logits(micro, output)

    def _logits(self, micro: int, logits: Tensor) -> tuple[Box, ...]:
        rank, case = self.rank, self.rank.case
        place = rank.strategy.activation(case, "head")
        assert place is not None
        sequences = 1 if case.packed else case.batch
        first = (rank.mesh.axis("dp").rank * case.micro + micro) * sequences
        boxes = rank.boxes(rank.strategy.laid_out(logits.detach()), place)
        return rows(boxes, first=first, total=case.dp * case.micro * sequences)

    def backward(self, micro: int) -> None:
        """Gradients of this stage's parameters and of what it received, from the gradient of what it sent."""
        torch.autograd.backward(self._outputs.pop(micro), self._gradients.pop(micro, None))

    def exchange(self, messages: Sequence[Action], peers: Sequence[int]) -> None:
        """Issue these messages as one batch and wait for all of them; `peers` are the global ranks at their ends."""
        group = self.rank.mesh.axis("pp").group
        tensors = [self._received(m) if m.kind in _RECEIVED else self._sent(m) for m in messages]
        operations = [
            dist.P2POp(dist.irecv if message.kind in _RECEIVED else dist.isend, tensor, other, group)
            for message, tensor, other in zip(messages, tensors, peers, strict=True)
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _received(self, message: Action) -> Tensor:
        """An empty tensor for what comes, kept for the computation that needs it."""
        rank, forward = self.rank, message.kind is Kind.RECV_FORWARD
        shape = message_shape(rank.case, sequence_dim=rank.strategy.sequence_dim)
        tensor = torch.empty(shape, dtype=dtype_of(rank.case), device=rank.device, requires_grad=forward)
        (self._inputs if forward else self._gradients)[message.micro] = tensor
        return tensor.detach()

    def _sent(self, message: Action) -> Tensor:
        """The output of a forward, or the gradient of a backward's input."""
        if message.kind is Kind.SEND_FORWARD:
            return self._outputs[message.micro].detach().contiguous()
        gradient = self._inputs.pop(message.micro).grad
        assert gradient is not None
        return gradient.contiguous()
