"""torchtitan's llama3, qwen3 and deepseek_v3 under its own parallelize functions (tp, sequence and loss parallel,
FSDP2, HSDP, ep), compared with the same model as it is built, in one process and float64. Needs torchtitan 0.3.

shardproof run "tp=2 dp=2 kind=qwen3" --subject suites.subjects.torchtitan:subject
"""

import contextlib
import zlib
from types import SimpleNamespace
from unittest import mock

import torch
import torchtitan.tools.utils
from torch import nn

from shardproof import softmax_shift

torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", torch.cpu  # without a GPU "cuda"

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402  (all of these read device_type)
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, full_dtensor, utils  # noqa: E402
from torchtitan.models import common, deepseek_v3, llama3, qwen3  # noqa: E402
from torchtitan.models.common import config_utils as parts  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.model import Llama3TransformerBlock  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3TransformerBlock  # noqa: E402

KINDS = {
    "llama3": (llama3.Llama3Model, llama3.parallelize_llama),
    "qwen3": (qwen3.Qwen3Model, qwen3.parallelize_qwen3),
    "deepseek_v3": (deepseek_v3.DeepSeekV3Model, deepseek_v3.parallelize_deepseekv3),
}
VOCAB, LENGTH, DIM = 96, 12, {"dim": 32, "n_heads": 8}


class Attention(ScaledDotProductAttention):
    """torchtitan's own for a CPU: what its models take by default compiles kernels of a GPU."""

    sdpa_backends = [nn.attention.SDPBackend.MATH]


def norm(size=32):
    return common.RMSNorm.Config(normalized_shape=size)


def block(case, rope):
    words = {"inner_attention": Attention.Config(), "rope": rope, "n_kv_heads": 4, "fuse_qkv": case.fused}
    words |= {"head_dim": 4, "qk_norm": norm(4)} if case.kind == "qwen3" else {}
    attention = parts.make_gqa_config(**DIM, **words, wqkv_param_init={}, wo_param_init={})
    inside = {"feed_forward": parts.make_ffn_config(dim=32, hidden_dim=48, w1_param_init={}, w2w3_param_init={})}
    if case.experts:
        sizes = {"dim": 32, "num_experts": case.experts, "top_k": 2}
        routed = parts.make_routed_experts_config(**sizes, hidden_dim=16, param_init={}, comm_backend="standard")
        router = parts.make_router_config(**sizes, gate_param_init={}, score_func="softmax", route_norm=True)
        moe = parts.make_moe_config(num_experts=case.experts, router=router, routed_experts=routed)
        inside = {"moe": moe}
    kind = Qwen3TransformerBlock if case.kind == "qwen3" else Llama3TransformerBlock
    return kind.Config(attention=attention, **inside, attention_norm=norm(), ffn_norm=norm())


def latent_blocks(case, rope):  # attention with latents, and experts behind the first layer
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    sizes |= {"dense_hidden_dim": 48, "moe_hidden_dim": 16, "num_experts": case.experts, "num_shared_experts": 1}
    sizes |= {"n_dense_layers": 1 if case.experts else 2, "router_top_k": 2, "router_score_func": "sigmoid"}
    init = {"linear_init": {}, "norm_init": {}, "depth_init": lambda _: {}, "depth_experts_init": lambda _: {}}
    ways = {"attn_backend": "flex", "moe_comm_backend": "standard", "non_blocking_capacity_factor": None}
    blocks = deepseek_v3.build_mla_moe_layers(n_layers=2, **DIM, **sizes, **init, **ways, mscale=1.0, rope=rope)
    for one in blocks:
        one.attention.inner_attention = Attention.Config()
    return blocks


def dense(case, parallelism):  # the whole model; its weights follow from names and the seed
    rope = (common.CosSinRoPE if case.kind == "qwen3" else common.ComplexRoPE).Config(dim=4, max_seq_len=LENGTH)
    blocks = latent_blocks(case, rope) if case.kind == "deepseek_v3" else [block(case, rope) for _ in range(2)]
    ends = {"tok_embeddings": common.Embedding.Config(num_embeddings=VOCAB, embedding_dim=32), "norm": norm()}
    ends |= {"lm_head": common.Linear.Config(in_features=32, out_features=VOCAB), "enable_weight_tying": case.tied}
    utils.set_spmd_backend(case.backend)
    config = KINDS[case.kind][0].Config(dim=32, vocab_size=VOCAB, layers=blocks, **ends)
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    model = config.build().to(getattr(torch, case.dtype))
    for name, weight in model.named_parameters():
        draws = torch.Generator().manual_seed(case.seed + zlib.crc32(name.encode()))
        weight.data.copy_(torch.randn(weight.shape, generator=draws, dtype=torch.float64) * 0.3)
    return model


def train(case, model, dp_ranks, dims):
    outcome, optimizer = {}, torch.optim.AdamW(model.parameters(), lr=0.01)
    context = utils.get_spmd_context(parallel_dims=dims)
    loss_of = CrossEntropyLoss.Config(global_vocab_size=VOCAB).build()
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            first = case.samples(step, micro, dp_rank, 2).start
            tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(first))
            inputs, labels = tokens[:, :-1], tokens[:, 1:]
            if dims and case.backend == "full_dtensor":
                inputs, labels, _ = full_dtensor.parallelize_inputs(dims, inputs, labels, {})
            with context():
                loss, _ = loss_of(model(inputs), labels, torch.tensor(labels.numel() * case.micro * case.dp))
                loss.backward()
            total += (loss.to_local() if isinstance(loss, torch.distributed.tensor.DTensor) else loss).detach()
        if dims and case.dp > 1:
            torch.distributed.all_reduce(total, group=dims.get_mesh("batch").get_group())
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    return train(case, dense(case, ParallelismConfig(spmd_backend=case.backend)), range(case.dp), None)


def subject(case, device):
    degrees = {"tensor_parallel_degree": case.tp, "data_parallel_replicate_degree": case.replicas}
    degrees |= {"data_parallel_shard_degree": case.dp // case.replicas, "expert_parallel_degree": case.ep}
    parallelism = ParallelismConfig(**degrees, spmd_backend=case.backend, enable_sequence_parallel=case.sp)
    model, dims = dense(case, parallelism), ParallelDims.from_config(parallelism, case.world_size)
    dims.build_mesh()
    training = TrainingConfig(mixed_precision_param=case.dtype, mixed_precision_reduce=case.dtype)
    words = {"compile_config": CompileConfig(enable=False), "ac_config": None, "dump_folder": ""}
    model = KINDS[case.kind][1](model, parallel_dims=dims, training=training, parallelism=parallelism, **words)
    return train(case, model, [case.axis_rank("dp", torch.distributed.get_rank())], dims)


@contextlib.contextmanager
def session():  # what torchtitan rounds to float32 or bfloat16 stays as it is
    stays = [mock.patch.object(torch.Tensor, name, lambda x: x) for name in ("float", "bfloat16")]
    with stays[0], stays[1], mock.patch.dict(TORCH_DTYPE_MAP, float64=torch.float64):
        yield


subject.truth, subject.session, subject.harmless = truth, session, softmax_shift
subject.words = {"kind": tuple(KINDS), "backend": ("spmd_types", "partial_dtensor", "full_dtensor"), "sp": True}
subject.words |= {"replicas": 1, "experts": 0, "ep": 1, "etp": 1, "tied": False, "fused": True, "micro": 2}
subject.cases = ("tp=2 dp=2", "tp=2 dp=2 kind=qwen3", "tp=2 dp=2 kind=deepseek_v3")
