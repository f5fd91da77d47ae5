"""InternEvo 58f723a (0.5.3): what two ranks compute differently from one, and clipping that does nothing.

INTERNEVO=checkout python docs/findings/internevo_modes.py norms|isp|table|rows|logits|clip
exit status 1 while the defect is there. Gloo is made to do what NCCL does: averages, and tensors as flat memory.
"""

import logging
import os
import sys
import tempfile
import types
import warnings
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ABSENT = ("requests", "datasets", "datasets.distributed", "transformers", "transformers.modeling_utils")
CASES = {"norms": ("msp", "norm.weight"), "isp": ("isp", "layers.0.feed_forward.w2.weight"), "rows": ("msp", "loss")}
CASES |= {"table": ("isp", "tok_embeddings.weight"), "logits": ("mtp", "loss"), "clip": ("mtp", "norm")}
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_kv_attention_heads": 4, "vocab_size": 48}
SIZES |= {"mlp_ratio": 1.25, "multiple_of": 8, "no_bias": True, "embed_grad_scale": 1}
SCALER = {"fp16": {"initial_scale": 1, "min_scale": 1, "growth_interval": 2}, "growth_factor": 2}
SCALER |= {"backoff_factor": 0.5, "hysteresis": 2, "max_scale": 2}


def as_nccl():
    calls = dist.all_reduce, dist.reduce_scatter_tensor, dist.all_gather_into_tensor

    def done(call, *tensors, op=dist.ReduceOp.SUM, async_op=False, **words):
        call(*(tensor.view(-1) for tensor in tensors), **words)
        if op == dist.ReduceOp.AVG:
            tensors[0].div_(dist.get_world_size(words.get("group")))
        return types.SimpleNamespace(wait=lambda: None)

    dist.all_reduce = lambda tensor, **words: done(calls[0], tensor, **words)
    dist.reduce_scatter_tensor = lambda *tensors, **words: done(calls[1], *tensors, **words)
    dist.all_gather_into_tensor = lambda *tensors, **words: done(calls[2], *tensors, **words)


def configured(case, rank, world):
    from internlm.core.context import ParallelMode
    from internlm.core.context import global_context as gpc

    kind, zero = CASES[case][0], {"overlap_sync_grad": False, "overlap_sync_param": False, "reduce_bucket_size": 10**6}
    parallel = {"tensor": {"size": world, "mode": kind}, "zero1": {"size": 1}}
    parallel["weight"] = {"size": world if kind == "isp" else 1, "overlap": False, "early_reduce_scatter_release": True}
    model = {"dtype": torch.float32, "checkpoint": False, "use_flash_attn": False, "parallel_output": case != "logits"}
    config = {"parallel": parallel, "model": model, "grad_scaler": SCALER, "isp_num_layers": 2}
    config["hybrid_zero_optimizer"] = zero | {"clip_grad_norm": 0.01 if case == "clip" else 0.0}
    config |= {"data": {"micro_num": 1, "use_packed_dataset": False}, "ckpt": {"need_metadata": False}}
    gpc.load_config(config | {"cpu_offloading": {"enable": False, "num_layers": 0}})
    gpc.config.reduce_comm_dtype = torch.float32
    gpc._register_dist(rank, world, dist.group.WORLD, None, [*range(world)], ParallelMode.GLOBAL)
    gpc._global_ranks[ParallelMode.GLOBAL] = rank
    gpc.init_parallel_groups()
    gpc._cpu_groups = gpc._groups
    return gpc


def rank_main(rank, world, case, folder):
    warnings.simplefilter("ignore")
    logging.disable()
    torch.cuda.synchronize = torch.cuda.current_stream = MagicMock()
    sys.path.insert(0, os.environ["INTERNEVO"])
    sys.modules.update({name: MagicMock() for name in ABSENT})  # imported, and not used here
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    as_nccl()
    gpc = configured(case, rank, world)
    from internlm.core.parallel.shard import split_data_for_sequence_parallel
    from internlm.model.losses.ce_loss import InternLoss
    from internlm.model.modeling_internlm2 import InternLM2
    from internlm.solver.optimizer import HybridZeroOptimizer
    from internlm.train import pipeline

    model, found = InternLM2(**SIZES, first=True, last=True, dropout_selective_checkpoint=False), {}
    for seed, weight in enumerate(model.parameters()):
        whole = getattr(weight, "complete_size", weight.shape)
        first = getattr(weight, "offset", None) or [0] * weight.dim()
        here = tuple(slice(at, at + size) for at, size in zip(first, weight.shape, strict=True))
        weight.data.copy_((torch.randn(whole, generator=torch.Generator().manual_seed(seed)) * 0.3)[here])
        weight.place = list(first), list(whole)
    pipeline.set_parallel_attr_for_param_groups(model)
    communicator = pipeline.initialize_parallel_communicator(model)
    adam = torch.optim.AdamW(pipeline.create_param_groups(model, 0.0))
    words = {"grad_scal_cfg": gpc.config.grad_scaler, "zero_cfg": gpc.config.hybrid_zero_optimizer}
    optimizer = HybridZeroOptimizer(adam, **words, isp_communicator=communicator)
    tokens = torch.randint(48, (2 if case == "rows" else 1, 9), generator=torch.Generator().manual_seed(0))
    data, labels = {"input_ids": tokens[:, :-1], "indexes": torch.arange(8)}, tokens[:, 1:]
    if CASES[case][0] == "isp":
        data, labels = split_data_for_sequence_parallel(data, labels)
    loss = InternLoss(parallel_output=case != "logits")(model(**data, max_seqlen=8), labels)
    optimizer.backward(loss)

    def seen(*_):  # gradients as Adam is given them
        flat, own = optimizer._fp32_flat_param_groups_of_current_rank[0], optimizer._param_store
        found["norm"] = flat.grad.norm()
        weights = own.get_fp16_params_by_rank_group(0, 0)
        for weight, part in zip(weights, flat.grad.split([one.numel() for one in weights]), strict=True):
            found[names[weight]] = part.view_as(weight).clone(), *weight.place

    names = {weight: name for name, weight in model.named_parameters()}
    adam.register_step_pre_hook(seen)
    optimizer.step()
    torch.save(found | {"loss": loss.detach()}, f"{folder}/{world}.{rank}")


def whole(name, folder, world):
    parts = [torch.load(f"{folder}/{world}.{rank}")[name] for rank in range(world)]
    if isinstance(parts[0], torch.Tensor):
        return parts[0]
    full = torch.zeros(parts[0][2])
    for part, first, _ in parts:
        full[tuple(slice(at, at + size) for at, size in zip(first, part.shape, strict=True))] = part
    return full


if __name__ == "__main__":
    case = sys.argv[1]
    kind, name = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            mp.spawn(rank_main, (world, case, folder), nprocs=world)
        right, found = whole(name, folder, 1), whole(name, folder, 2)
    if case == "clip":
        right = torch.tensor(0.01)
    if right.dim() == 0:
        print(f"{kind}: {name} {found:.6f}, right {right:.6f}")
    else:
        found = found * (2 if case == "table" else 1)  # the factor of `isp` apart
        at = (found - right).abs().argmax()
        numbers = (found.norm(), right.norm(), found.flatten()[at], right.flatten()[at])
        words = "{}: gradient of {}: norm {:.6f}, right {:.6f}; most different {:.6f}, right {:.6f}"
        print(words.format(kind, name, *numbers))
    sys.exit(not torch.allclose(found, right, rtol=1e-3, atol=1e-5))
