"""Megatron-Core trains a GPTModel as its own loop does, over tp with sp, dp, pp, ep and etp. The loop: schedule, DDP,
clipping, Adam or its distributed optimizer, dropout, recomputation. The truth is one rank, which drops as ranks did.
"""

import contextlib
import warnings
import zlib
from unittest import mock

import torch

from shardproof import Shard, cuda_on_cpu, softmax_shift

with warnings.catch_warnings(action="ignore"):  # Megatron's own, at import
    from megatron.core import distributed, optimizer, parallel_state, pipeline_parallel
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

moe_utils.te_general_gemm = None  # in 0.16.1 the router looks for this name, and has it with TransformerEngine alone
SIZES = {"num_layers": 4, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 40, "add_bias_linear": False}
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall"}


class _TorchNorm(torch.nn.LayerNorm):  # where the sequence is split, Megatron's own needs Apex or TransformerEngine
    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = self.bias.sequence_parallel = config.sequence_parallel  # sums over tp


def parts(model, tensor_of):  # of a rank, by the numbers of layers and experts in the whole model
    stages, experts = (getattr(parallel_state, f"get_{kind}_model_parallel_group")() for kind in ("pipeline", "expert"))
    first = {"layers": model.config.num_layers // stages.size() * stages.rank()}
    first["local_experts"] = (model.config.num_moe_experts or 0) // experts.size() * experts.rank()
    for name, weight in model.named_parameters():
        words, tensor = name.split("."), tensor_of(weight)
        for at, word in enumerate(words[:-1], 1):
            words[at] = str(int(words[at]) + first[word]) if word in first else words[at]
        offsets, shape = [0] * tensor.dim(), list(tensor.shape)
        if getattr(weight, "tensor_model_parallel", False):
            dim, kind = weight.partition_dim, "expert_tensor" if "local_experts" in words else "tensor_model"
            ranks = getattr(parallel_state, f"get_{kind}_parallel_group")()
            offsets[dim], shape[dim] = ranks.rank() * shape[dim], ranks.size() * shape[dim]
        yield ".".join(words), Shard(tensor, tuple(offsets), tuple(shape))


def build(case):  # groups, streams, model and optimizer of Megatron; weights follow from their names and the seed
    axes = {"tensor_model_parallel_size": case.tp, "pipeline_model_parallel_size": case.pp}
    axes |= {"expert_model_parallel_size": case.ep, "expert_tensor_parallel_size": case.etp}
    parallel_state.initialize_model_parallel(**axes)
    model_parallel_cuda_manual_seed(1 + 100 * parallel_state.get_pipeline_model_parallel_rank())
    words = axes | SIZES | (EXPERTS if case.experts else {}) | (AGAIN if case.recompute else {})
    words |= {"sequence_parallel": case.tp > 1, "attention_dropout": case.dropout, "hidden_dropout": case.dropout}
    words |= dict.fromkeys(("params_dtype", "pipeline_dtype"), getattr(torch, case.dtype))
    config = TransformerConfig(**words, finalize_model_grads_func=distributed.finalize_model_grads)
    layer = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _TorchNorm
    block = TransformerBlockSubmodules([layer] * (config.num_layers // case.pp), _TorchNorm)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = GPTModel(config, block, 96, 12, pre_process=first, post_process=last).to(config.params_dtype)
    for name, part in parts(model, lambda weight: weight.data):
        draws = torch.Generator().manual_seed(case.seed + zlib.crc32(name.encode()))
        here = tuple(slice(first, first + size) for first, size in zip(part.offsets, part.local.shape, strict=True))
        part.local.copy_(torch.randn(part.global_shape, generator=draws, dtype=torch.float64)[here] * 0.2)
    sharded = {"use_distributed_optimizer": case.sharded and case.dp > 1}
    model = distributed.DistributedDataParallel(config, distributed.DistributedDataParallelConfig(**sharded), model)
    adam = optimizer.OptimizerConfig(lr=0.01, clip_grad=1.0, params_dtype=config.params_dtype, **sharded)
    return model, optimizer.get_megatron_optimizer(adam, [model])


def subject(case, device):
    def forward(batches, model):
        tokens = next(batches)
        losses = model(tokens[:, :-1], torch.arange(12).expand(2, 12), mask, labels=tokens[:, 1:])
        return losses, lambda losses: (losses.mean(), losses.detach().mean() / case.micro)

    (model, adam), outcome, mask = build(case), {}, torch.ones(1, 1, 12, 12).triu(1).bool()
    words = {"num_microbatches": case.micro, "seq_length": 12, "micro_batch_size": 2, "forward_only": False}
    run, dp_rank = pipeline_parallel.get_forward_backward_func(), parallel_state.get_data_parallel_rank()
    for step in range(case.steps):
        model.zero_grad_buffer()
        adam.zero_grad()
        first = [case.samples(step, micro, dp_rank, 2).start for micro in range(case.micro)]  # numbers of samples
        batches = (torch.randint(96, (2, 13), generator=torch.Generator().manual_seed(number)) for number in first)
        if losses := run(forward_step_func=forward, data_iterator=batches, model=[model], **words):  # on the last stage
            outcome[f"loss/{step}"] = Shard(total := sum(losses) / case.dp, (), ())
            torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        split = model.ddp_config.use_distributed_optimizer and step == 0  # a rank has its share of a sum: gather all
        for group in model.bucket_groups + model.expert_parallel_bucket_groups if split else ():
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=ranks)
        outcome |= {f"grad/{n}": one for n, one in parts(model.module, lambda w: w.main_grad.clone()) if step == 0}
        outcome[f"grad_norm/{step}"] = torch.tensor(adam.step()[1], dtype=getattr(torch, case.dtype))
    return outcome | {f"param/{name}": part for name, part in parts(model.module, lambda weight: weight.data)}


@contextlib.contextmanager
def session():  # Megatron asks CUDA for its device and random states, and its optimizer takes float32 alone
    def cast_tensor(tensor, *to):
        return "torch.cuda.FloatTensor" if tensor.dtype == torch.float64 and not to else of_torch(tensor, *to)

    with cuda_on_cpu(), warnings.catch_warnings(action="ignore"):
        of_torch = torch.Tensor.type
        with mock.patch.object(torch.Tensor, "type", cast_tensor):
            yield


subject.truth, subject.session, subject.harmless = "alone", session, softmax_shift
subject.words = dict.fromkeys(("sharded", "experts", "recompute"), False) | dict.fromkeys(("ep", "etp"), 1)
subject.words |= {"micro": 4, "dropout": 0.0, "dtype": "float32"}
subject.per_rank = ("megatron.core.parallel_state", "megatron.core.tensor_parallel.random")
subject.refuses = lambda case: "computes its cross entropy in float32" if case.dtype == "float64" else ""
subject.cases = ("tp=2 pp=2", "dp=2 ep=2 experts=true sharded=true")
