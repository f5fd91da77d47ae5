"""Megatron-Core's GPTModel in its DistributedDataParallel, for mcore, mcore_experts, mcore_latent and mcore_heads.

They share weights that follow from their names, where each part lies, and steps of SGD.
"""

import warnings
import zlib
from contextlib import nullcontext
from typing import Any

import torch

from shardproof import softmax_shift
from shardproof.suites.subjects import megatron
from shardproof.suites.subjects.mcore_parts import parts, weights

with warnings.catch_warnings(action="ignore"):  # Megatron's own, at import
    from megatron.core import distributed, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

SIZES = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 40}
PLAIN: dict[str, Any] = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True}
PLAIN |= dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), torch.nn.init.zeros_)


def draw_weight(case, name, shape):  # the full weight of this name, the same on every rank and for every layout
    draws = torch.Generator().manual_seed(case.seed + zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=draws) * 0.2).to(getattr(torch, case.dtype))


def micro_batch(case, step, micro, dp_rank):  # tokens [2, 13]; with `equal`, the same in all micro-batches
    numbers = range(2) if case.equal else case.samples(step, micro, dp_rank, 2)
    draws = [torch.Generator().manual_seed(number) for number in numbers]
    return torch.stack([torch.randint(96, (13,), generator=draw) for draw in draws])


class LocalNorm:
    """torch's norm: where the sequence is split, Megatron's own needs Apex or TransformerEngine."""

    def __new__(cls, config, hidden_size, eps=1e-5):
        """The norm; what Megatron sums over tp has a mark."""
        norm = getattr(torch.nn, config.normalization)(hidden_size, eps)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm


def start(case, **axes):  # Megatron's groups and streams, and the words of a configuration that follow from them
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.tp, **axes)
    model_parallel_cuda_manual_seed(1)
    config = {"tensor_model_parallel_size": case.tp, "sequence_parallel": case.sp and case.tp > 1, **axes}
    return config | SIZES | PLAIN | {"params_dtype": getattr(torch, case.dtype)}


def wrap_model(case, config, layer, **words):  # a GPTModel of these layers, whose weights follow from name and seed
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LocalNorm
    block = TransformerBlockSubmodules([layer] * config.num_layers, LocalNorm)
    model = GPTModel(config, block, 96, 12, **words).to(config.params_dtype)
    for name, weight in weights(model):
        for part in parts(model, name, weight, weight.data):
            here = tuple(slice(first, first + size) for first, size in zip(part.offsets, part.local.shape, strict=True))
            part.local.copy_(draw_weight(case, name, part.global_shape)[here])
    return distributed.DistributedDataParallel(config, distributed.DistributedDataParallelConfig(), model)


def train(case, model):
    places, per_token = torch.arange(12).expand(2, 12), model.config.calculate_per_token_loss
    mask, dp_rank = torch.ones(1, 1, 12, 12).triu(1).bool(), parallel_state.get_data_parallel_rank()
    outcome, optimizer = {}, torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(case.steps):
        model.zero_grad_buffer()
        total, count = 0.0, torch.zeros((), dtype=torch.int64)
        for micro in range(case.micro):
            tokens = micro_batch(case, step, micro, dp_rank)
            with model.no_sync() if micro < case.micro - 1 else nullcontext():
                losses = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])
                loss = losses.sum() if per_token else losses.mean() / case.micro
                loss.backward()
            total, count = total + losses.detach().mean() / case.micro, count + losses.numel()
        distributed.finalize_model_grads([model], *([count] if per_token else []))
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        outcome[f"loss/{step}"] = total / case.dp
        for name, weight in weights(model.module):
            weight.grad = weight.main_grad.to(weight.dtype)
            if step == 0:
                outcome[f"grad/{name}"] = list(parts(model.module, name, weight, weight.grad.clone()))
        optimizer.step()
        optimizer.zero_grad()  # Megatron adds a gradient that is left here to its main_grad
    parameters = weights(model.module)
    return outcome | {
        f"param/{name}": list(parts(model.module, name, weight, weight.data)) for name, weight in parameters
    }


def add_statements(subject, **words):  # what all these subjects state
    subject.truth, subject.words = "alone", {"dtype": "float32", "equal": False, **words}
    subject.per_rank = (*megatron.subject.per_rank, "megatron.core.transformer.multi_token_prediction")
    subject.session = megatron.session
    subject.refuses = lambda case: "computes its cross entropy in float32" if case.dtype == "float64" else ""
    subject.harmless = softmax_shift
