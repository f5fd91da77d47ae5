"""Megatron-Core's schedules run as they are: over ranks that compute, or every rank for itself, its steps noted.

Where steps are noted, the communicator is theirs but for the call that would send: it notes which messages are issued
together. Three things are answered for it. CUDA is the CPU, groups are their size and a rank, and torch.distributed
counts as initialised.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules as theirs
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from shardproof import cuda_on_cpu
from shardproof.parallel.communication.schedules import Kind, Pipeline
from tests.parallel.ranks import group

Step = tuple[Any, ...]
"""("F" or "B", chunk, micro-batch), or the kinds of the messages of a batch."""


def run_schedule(
    forward: Callable[..., Any],
    chunks: Sequence[Any],
    stages: Any,
    one: Any,
    *,
    group: int | None,
    sizes: tuple[int, int, int],
    communicator: Callable[[Any, Any], Any] = P2PCommunicator,
    **words: Any,
) -> None:
    """Run micro-batches of (batch, seq) tokens through the chunks of a rank; `sizes` are micro, batch and seq.

    `stages` is the group of the pipeline and `one` that of every other axis. `group` is the micro-batches in a row of
    an interleaved schedule, None for another one; `words` are those of its configuration.
    """
    micro, batch, seq = sizes
    config = TransformerConfig(
        pipeline_model_parallel_size=stages.size(),
        virtual_pipeline_model_parallel_size=len(chunks) if group else None,
        microbatch_group_size_per_vp_stage=group,
        batch_p2p_comm=True,
        overlap_p2p_comm=False,
        deallocate_pipeline_outputs=False,
        **words,
    )
    for number, chunk in enumerate(chunks):
        chunk.config, chunk.model_type, chunk.vp_stage = config, ModelType.encoder_or_decoder, number
    with cuda_on_cpu():
        getattr(theirs, f"forward_backward_pipelining_{'with' if group else 'without'}_interleaving")(
            forward_step_func=forward,
            data_iterator=[iter(range(micro)) for _ in chunks],
            model=[*chunks],
            num_microbatches=micro,
            seq_length=seq,
            micro_batch_size=batch,
            p2p_communicator=communicator(stages, config),
            pg_collection=SimpleNamespace(tp=one, cp=one, embd=one, pos_embd=one, pp=stages, dp_cp=one),
        )


class Noting(P2PCommunicator):
    """Megatron-Core's communicator; what it would send and receive together is one step of `done`."""

    def __init__(self, pp_group: Any, config: Any, done: list[Step]) -> None:
        self.pp_group, self.config, self.done = pp_group, config, done
        self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

    def _communicate(
        self, *, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool, **_: Any
    ) -> Any:
        issued = {
            Kind.SEND_BACKWARD: tensor_send_prev is not None,
            Kind.RECV_FORWARD: recv_prev,
            Kind.SEND_FORWARD: tensor_send_next is not None,
            Kind.RECV_BACKWARD: recv_next,
        }
        if any(issued.values()):
            self.done.append(tuple(kind for kind, there in issued.items() if there))
        received = [torch.zeros(2, 1, 4, requires_grad=True) if there else None for there in (recv_prev, recv_next)]
        return *received, None


class Note(torch.autograd.Function):
    """Passes a tensor on and calls back when its gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Callable[[], None]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen()
        return grad, None


class Chunk(nn.Module):
    """A chunk of a model that computes nothing."""

    def __init__(self, number: int, done: list[Step]) -> None:
        super().__init__()
        self.number, self.done = number, done
        self.own = nn.Parameter(torch.zeros(2, 1, 4))

    def set_input_tensor(self, inputs: list[Tensor | None]) -> None:
        self.input = inputs[0]

    def compute(self, micro: int) -> Tensor:
        self.done.append(("F", self.number, micro))
        given = self.own if self.input is None else self.input
        output: Tensor = Note.apply(given, lambda: self.done.append(("B", self.number, micro)))
        return output


def step(batches: Iterator[int], chunk: Chunk) -> tuple[Tensor, Callable[[Tensor], Any]]:
    return chunk.compute(next(batches)), lambda output: (output.sum(), {})


def run(pipeline: Pipeline, rank: int) -> list[Step]:
    """Steps of Megatron-Core on a rank, in order."""
    done: list[Step] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torch.distributed.is_initialized", lambda: True)
        run_schedule(
            step,
            [Chunk(number, done) for number in range(pipeline.chunks)],
            group(pipeline.ranks, rank),
            group(),
            group=pipeline.in_a_row if pipeline.schedule == "interleaved" else None,
            sizes=(pipeline.micro, 1, 2),
            communicator=partial(Noting, done=done),
            num_layers=pipeline.virtual_stages,
            hidden_size=4,
            num_attention_heads=1,
            pipeline_dtype=torch.float32,
        )
    return done
