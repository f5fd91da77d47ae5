"""The ledger of unmodified Megatron-Core: its 1F1B schedule with tied embeddings and the distributed optimizer.

Megatron is written for CUDA, whose questions are answered for the CPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.torch_internals.cuda_on_cpu import cuda_on_cpu
from tests.harness.recording.toy_calls import recorded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron's own, at import
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
STATE = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")
STEPS, MICRO, SEQ = 2, 3, 8


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with cuda_on_cpu():
        yield


def config_of(**words: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        **words,
    )


def forward(_data: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]:
    """The schedule's forward step: the output and the function that reduces it to the loss."""
    tokens, mask = torch.arange(SEQ).view(1, SEQ), torch.ones(1, 1, SEQ, SEQ).triu(1).bool()
    return model(tokens, tokens, mask, labels=tokens), lambda out: (out.mean(), {"loss": out.detach().mean()})


def pipeline(_rank: int) -> None:
    """Two stages, two data ranks: 1F1B with tied embeddings, and the distributed optimizer with clipping."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(0)
    config = config_of(pipeline_dtype=torch.float32, batch_p2p_comm=True, batch_p2p_sync=False)
    last = parallel_state.is_pipeline_last_stage()
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=32,
        max_sequence_length=SEQ,
        pre_process=not last,
        post_process=last,
        share_embeddings_and_output_weights=True,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
    how = OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True, clip_grad=1.0)
    optimizer = get_megatron_optimizer(how, [model])
    config.finalize_model_grads_func = finalize_model_grads
    for _step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(()),
            model=[model],
            num_microbatches=MICRO,
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        if last:
            dist.all_reduce(losses[0]["loss"].clone(), group=parallel_state.get_data_parallel_group())


def test_the_1f1b_schedule_and_the_distributed_optimizer() -> None:
    alone = ((0,), (1,), (2,), (3,))
    axes = {"tp": alone, "cp": alone, "dp": ((0, 1), (2, 3)), "pp": ((0, 2), (1, 3))}
    events = recorded(pipeline, 4, per_rank=STATE, **axes)
    assert not [event.doubts for event in events if event.doubts]
    update = [
        ("reduce_scatter", "grad_sync", "dp"),
        ("all_reduce", "grad_sync", "embedding"),
        ("all_reduce", "grad_sync", "dp_pp"),  # the norm, over all ranks of an optimizer
        ("all_gather", "step", "dp"),
    ]
    turns = [("send", 0), *[(op, m + (op == "send")) for m in range(MICRO) for op in ("send", "recv")]]
    messages = {
        False: [turn for turn in turns if turn[1] < MICRO],
        True: [(op, m) for m in range(MICRO) for op in ("recv", "send")],
    }
    for rank in range(4):
        last = rank >= 2
        # Before its first forward it compares what the optimizer of each rank is.
        mine = [e for e in events if e.rank == rank and e.phase != "data"]
        for step in range(STEPS):
            of_step = [e for e in mine if e.step == step]
            hops = [e for e in of_step if e.phase == "pipeline"]
            assert [(e.op, e.microbatch) for e in hops] == messages[last]
            assert {e.axis for e in hops} == {"pp"}
            rest = [(e.op, e.phase, e.axis) for e in of_step if e.phase not in ("pipeline", "forward")]
            assert rest == [*update, *([("all_reduce", "metric", "dp")] if last else [])]
            assert {e.axis for e in of_step if e.phase == "forward"} <= {"tp"}
