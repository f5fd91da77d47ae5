"""Megatron-Core's GPTModel as it is, split over tp on CPUs, compared with itself on one rank. Needs megatron-core.

shardproof calls `subject` on every rank, and once more with tp=1 for the truth.
"""

import contextlib
import warnings

import torch

from shardproof import Shard, cuda_on_cpu, softmax_shift

with warnings.catch_warnings(action="ignore"):  # Megatron's own, at import
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig


def build(case):  # drawn on the CPU a weight is drawn whole and cut then, so that it does not depend on tp
    words = {"use_cpu_initialization": True, "attention_dropout": case.dropout, "hidden_dropout": case.dropout}
    words |= {"hidden_size": 24, "num_attention_heads": 4, "tensor_model_parallel_size": case.tp}
    torch.manual_seed(case.seed)
    config = TransformerConfig(num_layers=case.layers, params_dtype=getattr(torch, case.dtype), **words)
    return GPTModel(config, gpt_layer_specs.get_gpt_layer_local_spec(), 96, 12).to(config.params_dtype)


def place_shard(case, weight, tensor):  # a part is returned with its offsets and the full shape, as Megatron marks it
    if not getattr(weight, "tensor_model_parallel", False):
        return tensor
    offsets, shape, dim = [0] * tensor.dim(), list(tensor.shape), weight.partition_dim
    offsets[dim], shape[dim] = parallel_state.get_tensor_model_parallel_rank() * shape[dim], case.tp * shape[dim]
    return Shard(tensor, tuple(offsets), tuple(shape))


def subject(case, device):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.tp)
    model_parallel_cuda_manual_seed(case.seed)
    model, places, mask = build(case), torch.arange(12).expand(3, 12), torch.ones(1, 1, 12, 12).triu(1).bool()
    total = torch.zeros((), dtype=getattr(torch, case.dtype))
    for micro in range(case.micro):
        generator = torch.Generator().manual_seed(case.samples(0, micro, 0, 3).start)  # the number of the first of 3
        tokens = torch.randint(96, (3, 13), generator=generator)
        loss = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:]).mean() / case.micro
        loss.backward()
        total += loss.detach()
    return {"loss/0": total} | {f"grad/{name}": place_shard(case, w, w.grad) for name, w in model.named_parameters()}


@contextlib.contextmanager
def session():  # Megatron asks CUDA for its device and random states, and warns of its own defaults
    with cuda_on_cpu(), warnings.catch_warnings(action="ignore"):
        yield


subject.truth, subject.cases = "alone", ("tp=2", "tp=4 micro=3")  # what runs when no case is named
subject.session, subject.harmless = session, softmax_shift  # faults of that maximum change nothing
subject.words = {"layers": 1, "dropout": 0.0, "dtype": "float32", "steps": 1}  # its cross entropy computes in float32
subject.per_rank = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")  # a state for each rank
subject.refuses = lambda case: "is one step of tp alone" if case.steps > 1 or case.world_size > case.tp else ""
