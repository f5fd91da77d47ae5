"""Megatron-Core's own 1F1B schedule over two stages, three micro-batches a step, tied embeddings, its DDP and its
distributed optimizer with clipping.

Megatron is written for CUDA, whose questions are answered for the CPU.
"""

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from shardproof import cuda_on_cpu

STEPS, MICRO, SEQ = 2, 3, 8


def forward(_data: Any, model: Any) -> Any:
    tokens, mask = torch.arange(SEQ).view(1, SEQ), torch.ones(1, 1, SEQ, SEQ).triu(1).bool()
    return model(tokens, tokens, mask, labels=tokens), lambda out: (out.mean(), {"loss": out.detach().mean()})


def main() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    warnings.simplefilter("ignore")  # Megatron's own
    with cuda_on_cpu():
        train()


def train() -> None:
    from megatron.core import parallel_state  # noqa: PLC0415  (under the context)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # noqa: PLC0415
    from megatron.core.models.gpt import GPTModel  # noqa: PLC0415
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: PLC0415
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: PLC0415
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: PLC0415
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415
    from megatron.core.transformer import TransformerConfig  # noqa: PLC0415

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=True,
        batch_p2p_sync=False,
    )
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
            sys.stdout.write(f"megatron {[one['loss'].item() for one in losses]}\n")


if __name__ == "__main__":
    main()
