"""Megatron-Core: one training step of a GPTModel, on two ranks and on one, and the gradient that differs.

python docs/findings/megatron_step.py KIND        exit status 1 while the defect is there; KIND: one of KINDS

No GPU and no TransformerEngine: CUDA's functions are answered here, and its norms are torch's.
"""

import contextlib
import os
import sys
import tempfile
import warnings
import zlib
from importlib.metadata import version

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}
EXPERTS |= {"moe_aux_loss_coeff": 0.1, "moe_ffn_hidden_size": 40, "add_bias_linear": False}
EXPERTS |= {"moe_router_load_balancing_type": "none"}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "rope_type": "rope", "qk_head_dim": 8, "qk_pos_emb_head_dim": 4}
LATENT |= {"v_head_dim": 8, "kv_channels": 8}
SUMS = {"calculate_per_token_loss": True}
ROUTER, DOWN = "decoder.layers.0.mlp.router.weight", "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
HEAD = "mtp.layers.0.eh_proj.weight"
KINDS = {  # axes, words of the configuration, the parameter whose gradient is looked at
    "experts": ({"tp": 2}, EXPERTS, "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"),
    "aux_loss": ({"tp": 2, "ep": 2}, EXPERTS | SUMS | {"moe_router_load_balancing_type": "aux_loss"}, ROUTER),
    "seq_aux_loss": ({"tp": 2, "ep": 2}, EXPERTS | SUMS | {"moe_router_load_balancing_type": "seq_aux_loss"}, ROUTER),
    "z_loss": ({"tp": 2, "ep": 2}, EXPERTS | SUMS | {"moe_z_loss_coeff": 0.1}, ROUTER),
    "global_aux_loss": ({"ep": 2}, EXPERTS | {"moe_router_load_balancing_type": "global_aux_loss"}, ROUTER),
    "rope_key": ({"tp": 2, "sp": False}, LATENT, DOWN),
    "rope_key_sp": ({"tp": 2}, LATENT, DOWN),
    "query_norm": (
        {"tp": 2, "sp": False},
        LATENT | {"qk_layernorm": True},
        "decoder.layers.0.self_attention.q_layernorm.weight",
    ),
    "heads": ({}, SUMS | {"mtp_num_layers": 1}, HEAD),
    "positions": ({"pp": 2}, {"mtp_num_layers": 1}, "embedding.position_embeddings.weight"),
    "offsets": ({"tp": 2, "sp": False}, {"softmax_type": "learnable"}, "norm"),
}
"""heads: a loss summed over tokens is compared with one averaged over them, both on one rank."""


class Norm:  # Megatron's own needs Apex or TransformerEngine where the sequence is split
    def __new__(cls, config, hidden_size, eps=1e-5):
        norm = torch.nn.LayerNorm(hidden_size, eps)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm


class Streams:  # stands for the streams of random numbers: nothing is drawn from them
    def is_initialized(self):
        return True

    @contextlib.contextmanager
    def fork(self, *_):
        yield


class Nothing:  # a CUDA stream or event
    def __getattr__(self, name):
        return lambda *_, **__: self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def without_cuda():
    def here(made):
        return lambda *args, **words: made(*args, **{k: "cpu" if k == "device" else v for k, v in words.items()})

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.stream = torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = lambda *_, **__: Nothing()
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    kind = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *to: kind(tensor, *to) if to else kind(tensor).replace("torch.", "torch.cuda.")
    for name in ("tensor", "zeros", "empty", "ones"):
        setattr(torch, name, here(getattr(torch, name)))
    for module in list(sys.modules.values()):
        if module.__name__.startswith("megatron") and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *_, **__: Streams()


def spec(config):  # the local layers, with what they lack without TransformerEngine
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils

    class Attention(DotProductAttention):
        def __init__(self, *args, k_channels=None, v_channels=None, **words):
            super().__init__(*args, **words)

    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    multi_latent_attention.HAVE_TE = False
    latent = hasattr(config, "kv_lora_rank")
    words = {"multi_latent_attention": latent, "qk_layernorm": config.qk_layernorm}
    layer = specs.get_gpt_layer_local_spec(num_experts=config.num_moe_experts, **words)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if latent:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = Attention
        if config.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = Norm
    heads = None
    if config.mtp_num_layers:
        heads = specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    if heads:  # the last stage alone has them
        inside = heads.layer_specs[0].submodules
        inside.enorm = inside.hnorm = inside.layer_norm = Norm
    return layer, heads


def fill(model, axes, stage):  # weights that follow from their names, whatever the layout
    from megatron.core import parallel_state

    tp, ep = axes.get("tp", 1), axes.get("ep", 1)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    for own, weight in model.named_parameters():
        name, (before, local, rest) = own, own.partition("local_experts.")
        name = name.replace("decoder.layers.0", f"decoder.layers.{stage}") if stage else name
        if local:
            number, _, rest = rest.partition(".")
            name = f"{before}{local}{int(number) + ep_rank * 4 // ep}.{rest}"
        split = tp > 1 and (getattr(weight, "tensor_model_parallel", False) or "softmax_offset" in name) and not local
        dim = max(getattr(weight, "partition_dim", 0), 0)
        shape = [size * tp if split and at == dim else size for at, size in enumerate(weight.shape)]
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.2
        weight.data.copy_(drawn.chunk(tp, dim)[tp_rank] if split else drawn)
        weight.split = dim if split else None


def step(axes, words):  # gradients after Megatron's own reductions, and the norm that it clips by
    from megatron.core import distributed, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    without_cuda()
    tp, ep = axes.get("tp", 1), axes.get("ep", 1)
    sizes = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
    pp = sizes["pipeline_model_parallel_size"] = axes.get("pp", 1)
    parallel_state.initialize_model_parallel(**sizes)
    words = words | sizes | {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "ffn_hidden_size": 40}
    words |= {"pipeline_dtype": torch.float32}
    words |= {"use_cpu_initialization": True, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    words["sequence_parallel"] = tp > 1 and axes.get("sp", True)
    config = (MLATransformerConfig if "kv_lora_rank" in words else TransformerConfig)(**words)
    layer, heads = spec(config)
    positions = "rope" if "kv_lora_rank" in words else "learned_absolute"
    stage = parallel_state.get_pipeline_model_parallel_rank()
    block = TransformerBlockSubmodules([layer] * (2 // pp), Norm)
    ends = {"pre_process": stage == 0, "post_process": stage == pp - 1}
    model = GPTModel(
        config,
        block,
        96,
        12,
        position_embedding_type=positions,
        mtp_block_spec=heads,
        share_embeddings_and_output_weights=bool(config.mtp_num_layers),
        **ends,
    )
    fill(model, axes, stage)
    ddp = distributed.DistributedDataParallel(config, distributed.DistributedDataParallelConfig(), model)
    tokens = torch.randint(96, (2, 13), generator=torch.Generator().manual_seed(5))
    mask, places = torch.ones(1, 1, 12, 12).triu(1).bool(), torch.arange(12).expand(2, 12)
    received = torch.zeros(12, 2, 24, requires_grad=True)
    if stage:
        dist.recv(received.data, 0)
        model.set_input_tensor(received)
    returned, sums = ddp(tokens[:, :-1], places, mask, labels=tokens[:, 1:]), config.calculate_per_token_loss
    if stage == pp - 1:
        losses = returned
        (losses.sum() if sums else losses.mean()).backward()
        dist.send(received.grad, 0) if stage else None
    else:
        dist.send(returned.detach(), 1)
        gradient = torch.zeros(12, 2, 24)
        dist.recv(gradient, 1)
        returned.backward(gradient)
    distributed.finalize_model_grads([ddp], *([torch.tensor(losses.numel())] if sums else []))
    found = {name: (weight.main_grad.clone(), weight.split) for name, weight in model.named_parameters()}
    if "softmax_type" in words:
        optimizer = OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=1.0, params_dtype=torch.float32)
        found["norm"] = torch.tensor(float(get_megatron_optimizer(optimizer, [ddp]).step()[1])), None
    return found


def rank_main(rank, world, folder, axes, words):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(step(axes, words), f"{folder}/{rank}")
    os._exit(0)


def ranks(world, axes, words):  # what every rank found
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (world, folder, axes, words), nprocs=world)
        return [torch.load(f"{folder}/{rank}") for rank in range(world)]


if __name__ == "__main__":
    axes, words, name = KINDS[sys.argv[1]]
    without_sums = {key: value for key, value in words.items() if key not in SUMS}
    (one,) = ranks(1, {}, without_sums if sys.argv[1] == "heads" else words)
    many = ranks(2, axes, words) if axes else ranks(1, axes, words)
    right, (found, split) = one[name][0], many[0][name]
    if split is not None:
        found = torch.cat([of_rank[name][0] for of_rank in many], split)
    at = int((found - right).abs().argmax())
    print(f"megatron-core {version('megatron-core')}, {sys.argv[1]}: {name}, {found.numel()} numbers")
    print(f"norm {found.norm():.7f}, right {right.norm():.7f}; ", end="")
    print(f"most different {found.view(-1)[at]:.7f}, right {right.view(-1)[at]:.7f}")
    sys.exit(not torch.allclose(found, right, rtol=5e-6 if name == "norm" else 1e-4, atol=1e-7))
