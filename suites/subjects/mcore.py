"""Unmodified Megatron-Core: GPTModel in its DistributedDataParallel over tp and dp, compared with itself on one rank.

shardproof run "tp=2 dp=2 sp=true llama=true" --subject suites.subjects.mcore:subject
"""

import warnings
from contextlib import nullcontext

import torch

from shardproof import Shard, softmax_shift
from suites.subjects import megatron

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron's own, at import
    from megatron.core import distributed, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
LLAMA |= {"num_query_groups": 2, "add_bias_linear": False}
PLAIN = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": True}


def parts(case, name, weight, tensor):  # of a rank's tensor, and where each lies in the full one
    split, dim = getattr(weight, "tensor_model_parallel", False), getattr(weight, "partition_dim", 0)
    tp, place = (case.tp, parallel_state.get_tensor_model_parallel_rank()) if split else (1, 0)
    gated = 2 if case.llama and "fc1" in name else 1  # gate and up are one tensor on every rank, each of them split
    shape = [size * tp if at == dim else size for at, size in enumerate(tensor.shape)]
    for number, part in enumerate(tensor.chunk(gated, dim)):
        offsets = [0] * part.dim()
        offsets[dim] = (number * tp + place) * part.shape[dim]
        yield Shard(part, tuple(offsets), tuple(shape))


class LocalNorm:
    """torch's norm: where the sequence is split, Megatron's own needs Apex or TransformerEngine."""

    def __new__(cls, config, hidden_size, eps=1e-5):
        """The norm; what Megatron sums over tp has a mark."""
        norm = getattr(torch.nn, config.normalization)(hidden_size, eps)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm


def build(case):
    config = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 40}
    config |= {"tensor_model_parallel_size": case.tp, "sequence_parallel": case.sp and case.tp > 1}
    config |= {**PLAIN, **(LLAMA if case.llama else {}), "params_dtype": getattr(torch, case.dtype)}
    config = TransformerConfig(**config)
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LocalNorm
    spec = TransformerBlockSubmodules([layer] * config.num_layers, LocalNorm)
    places = "rope" if case.llama else "learned_absolute"
    model = GPTModel(config, spec, 96, 12, position_embedding_type=places).to(config.params_dtype)
    for number, (name, weight) in enumerate(model.named_parameters()):  # as they are drawn, they depend on tp
        for part in parts(case, name, weight, weight.data):
            full = torch.randn(part.global_shape, generator=torch.Generator().manual_seed(100 * case.seed + number))
            here = tuple(slice(first, first + size) for first, size in zip(part.offsets, part.local.shape, strict=True))
            part.local.copy_(full[here] * 0.2)
    return distributed.DistributedDataParallel(config, distributed.DistributedDataParallelConfig(), model)


def subject(case, device):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.tp)
    model_parallel_cuda_manual_seed(1)
    model, places = build(case), torch.arange(12).expand(2, 12)
    mask, dp_rank = torch.ones(1, 1, 12, 12).triu(1).bool(), parallel_state.get_data_parallel_rank()
    outcome, optimizer = {}, torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(case.steps):
        model.zero_grad_buffer()
        total = 0.0
        for micro in range(case.micro):
            draws = [torch.Generator().manual_seed(number) for number in case.samples(step, micro, dp_rank, 2)]
            tokens = torch.stack([torch.randint(96, (13,), generator=draw) for draw in draws])
            with model.no_sync() if micro < case.micro - 1 else nullcontext():
                loss = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:]).mean() / case.micro
                loss.backward()
            total += loss.detach()
        distributed.finalize_model_grads([model])
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        outcome[f"loss/{step}"] = total / case.dp
        for name, weight in model.module.named_parameters():
            weight.grad = weight.main_grad.to(weight.dtype)
            if step == 0:
                outcome[f"grad/{name}"] = list(parts(case, name, weight, weight.grad.clone()))
        optimizer.step()
        optimizer.zero_grad()  # Megatron adds a gradient that is left here to its main_grad
    weights = model.module.named_parameters()
    return outcome | {f"param/{name}": list(parts(case, name, weight, weight.data)) for name, weight in weights}


subject.truth = "alone"
subject.words = {"sp": False, "llama": False, "dtype": "float32"}  # its cross entropy computes in float32
subject.cases = ("tp=2", "tp=2 dp=2 sp=true", "tp=2 llama=true", "tp=2 sp=true llama=true")
subject.per_rank, subject.session = megatron.subject.per_rank, megatron.session
subject.refuses = lambda case: "computes its cross entropy in float32" if case.dtype == "float64" else ""
subject.harmless = softmax_shift
