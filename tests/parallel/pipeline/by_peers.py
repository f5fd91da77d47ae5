"""Our stages driven by the schedules of Megatron-Core and of torch as they are; all else is ours, closed form too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from parallel.communication.expectation import CompleteTerm
from parallel.communication.layout import Box
from parallel.communication.mesh import Mesh
from parallel.model.strategy import Rank, Step, Value
from parallel.pipeline.scheme import StageRun, message_shape
from parallel.registry import strategy_of
from parallel.schedules.pipeline import Action, Kind
from parallel.subject import subject as ours
from parallel.training.loop import train
from reference.case import Case
from reference.model.parameters import dtype_of
from shardproof import cuda_on_cpu

Scheduled = tuple[Tensor, Tensor, tuple[Box, ...] | None]


class _Chunk(nn.Module):
    """One of our stages as a module of theirs; `chunk` stays outside of it, so that modules keep our names."""

    def __init__(self, run: StageRun, number: int, config: Any = None, model_type: Any = None) -> None:
        super().__init__()
        self.run, self.number = run, number
        self.config, self.model_type, self.vp_stage = config, model_type, number
        self.stage = run.rank.chunks[number][0].index
        self.given: Tensor | None = None

    def set_input_tensor(self, inputs: list[Tensor | None]) -> None:
        self.given = inputs[0]

    def output(self, micro: int, given: Tensor | None) -> Tensor:
        action = Action(Kind.F, micro, self.number, self.stage)
        if given is not None:
            self.run.inputs[micro, self.stage] = given
        self.run.forward(action)
        return self.run.outputs.pop((micro, self.stage)).contiguous()

    def forward(self, x: Tensor, micro: Tensor) -> Tensor:
        return self.output(int(micro), x if self.stage else None)


def _megatron(rank: Rank, step: int) -> Scheduled:
    from megatron.core.enums import ModelType  # noqa: PLC0415
    from megatron.core.pipeline_parallel import schedules  # noqa: PLC0415  (an extra)
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: PLC0415
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415

    case, run, group = rank.case, StageRun(rank, step), rank.mesh.axis("pp").group
    looped = case.chunks > 1
    config = TransformerConfig(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.chunks if looped else None,
        microbatch_group_size_per_vp_stage=(case.group or case.pp) if looped else None,
        pipeline_dtype=dtype_of(case),
        batch_p2p_comm=True,
        batch_p2p_sync=False,
        overlap_p2p_comm=False,
        deallocate_pipeline_outputs=False,
        calculate_per_token_loss=True,
    )
    chunks = [_Chunk(run, number, config, ModelType.encoder_or_decoder) for number in range(case.chunks)]
    one = rank.mesh.axis("tp").group

    def forward(batches: Any, chunk: _Chunk) -> tuple[Tensor, Callable[[Tensor], Any]]:
        return chunk.output(next(batches), chunk.given), lambda loss: (loss, torch.ones((), dtype=torch.int), {})

    name = "with" if looped else "without"
    with cuda_on_cpu():
        getattr(schedules, f"forward_backward_pipelining_{name}_interleaving")(
            forward_step_func=forward,
            data_iterator=[iter(range(case.micro)) for _ in chunks] if looped else iter(range(case.micro)),
            model=chunks,
            num_microbatches=case.micro,
            seq_length=case.seq,
            micro_batch_size=case.batch,
            p2p_communicator=P2PCommunicator(group, config),
            pg_collection=SimpleNamespace(tp=one, cp=one, embd=one, pos_embd=one, pp=group, dp_cp=one),
        )
    return run.loss, run.tokens, run.logits


def _torch(rank: Rank, step: int) -> Scheduled:
    from torch.distributed import pipelining  # noqa: PLC0415  (imports much)

    case, run, axis = rank.case, StageRun(rank, step), rank.mesh.axis("pp")
    kind = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}.get(case.schedule)
    shape = message_shape(case, sequence_dim=rank.strategy.sequence_dim)
    between = torch.empty(shape, dtype=dtype_of(case), requires_grad=True)
    numbers = torch.arange(case.micro)
    stages: Any = [
        pipelining.PipelineStage(
            _Chunk(run, number),
            stage.index,
            stage.count,
            rank.device,
            input_args=(numbers[:1],) if stage.first else (between,),
            output_args=(torch.zeros((), dtype=dtype_of(case), requires_grad=True),) if stage.last else (between,),
            group=axis.group,
        )
        for number, (stage, _) in enumerate(rank.chunks)
    ]
    made = (
        kind(stages[0], case.micro, loss_fn=_given, scale_grads=False)
        if kind
        else pipelining.ScheduleInterleaved1F1B(stages, case.micro, loss_fn=_given, scale_grads=False)
    )
    first, last = stages[0].is_first, stages[-1].is_last
    words: dict[str, Any] = {"target": numbers, "losses": []} if last else {}
    made.step(*((numbers,) if first else ()), micro=numbers, return_outputs=False, **words)
    return run.loss, run.tokens, run.logits


def _given(loss: Tensor, _target: Tensor) -> Tensor:
    return loss


@dataclass(frozen=True)
class _Subject:
    schedule: Callable[[Rank, int], Scheduled]

    def __call__(self, case: Case, device: torch.device) -> dict[str, Value]:
        strategy = strategy_of(case)

        def step(case: Case, plain: Step) -> Step:
            return replace(strategy.step(case, plain), schedule=self.schedule)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # theirs
            return train(case, replace(strategy, step=step), Mesh.of(case), device)

    def refuses(self, case: Case) -> str:
        return "" if case.pp > 1 else "pp=1"

    def expected(self, case: Case) -> Iterable[CompleteTerm]:
        return ours.expected(case)


by_megatron, by_torch = _Subject(_megatron), _Subject(_torch)
