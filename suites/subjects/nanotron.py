"""nanotron's Qwen2 as its trainer builds and trains it, over tp, dp and pp, compared with itself on one rank. `sp` is
its mode REDUCE_SCATTER, `overlap` its asynchronous linear layers. FlashAttention's two kernels have stand-ins below.
NANOTRON=checkout shardproof run "tp=2 dp=2 sp=true" --subject shardproof.suites.subjects.nanotron:subject
"""

import functools
import warnings

import numpy
import torch
from torch.nn.parallel import DistributedDataParallel

from shardproof import Shard, softmax_shift
from shardproof.suites.subjects.checkout import checkout, fill, on_cpu, tokens_of

with checkout("NANOTRON", "src", "flash_attn triton grouped_gemm datasets dacite datatrove numba s3fs wandb"):
    from nanotron.config import ParallelismArgs
    from nanotron.config.models_config import Qwen2Config
    from nanotron.data.clm_collator import DataCollatorForCLMWithPositionIds
    from nanotron.models import base, qwen
    from nanotron.nn import rotary
    from nanotron.optim.clip_grads import clip_grad_norm
    from nanotron.parallel import ParallelContext
    from nanotron.parallel.tied_parameters import sync_tied_weights_gradients
    from nanotron.trainer import mark_tied_parameters

SIZES = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 40}
SIZES |= {"vocab_size": 48, "num_hidden_layers": 3, "attention_bias": True, "_fused_rms_norm": False}


def attention(q, kv, *_, **words):  # flash_attn_varlen_kvpacked_func for sequences of 12
    q, k, v = (one.unflatten(0, (-1, 12)).transpose(1, 2) for one in (q, *kv.unbind(1)))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


class Rotary(torch.nn.Module):
    """FlashRotaryEmbedding, of queries and packed keys."""

    def __init__(self, dim, base, **words):
        super().__init__()
        self.angles = torch.outer(torch.arange(12.0), base ** -torch.arange(0, 1, 2 / dim))

    def forward(self, q, kv, **words):
        """Turn queries and keys by the angles of their places."""
        cos, sin = self.angles.cos().unsqueeze(1).to(q.dtype), self.angles.sin().unsqueeze(1).to(q.dtype)

        def turn_halves(x):
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        return turn_halves(q), torch.stack([turn_halves(kv[:, :, 0]), kv[:, :, 1]], 2)


warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")  # per_rank reads all attributes
qwen.flash_attn_varlen_kvpacked_func, rotary.FlashRotaryEmbedding = attention, Rotary


def place_shard(weight, tensor):  # as nanotron marks it: parts of q, k and v, of gate and up, lie apart
    if not weight.is_sharded:
        return [Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape))]
    info = weight.get_sharded_info()
    starts = ([int(where.start or 0) for where in pair.global_slices] for pair in info.local_global_slices_pairs)
    parts, shape = (tensor[pair.local_slices] for pair in info.local_global_slices_pairs), info.unsharded_shape
    return [Shard(part, tuple(first), tuple(map(int, shape))) for part, first in zip(parts, starts, strict=True)]


def build(case, context):
    args = ParallelismArgs(case.dp, case.pp, case.tp, case.schedule, "REDUCE_SCATTER" if case.sp else "ALL_REDUCE")
    args.tp_linear_async_communication, args.tp_recompute_allgather = case.overlap, case.gather_again
    config = Qwen2Config(**SIZES, log_attn_probs=False, tie_word_embeddings=case.tied)
    words = {"parallel_context": context, "dtype": getattr(torch, case.dtype), "device": torch.device("cpu")}
    model = base.build_model(lambda: qwen.Qwen2ForTraining(config, context, args), **words)
    mark_tied_parameters(model, context, args)
    for name, weight in model.named_parameters():
        fill(case, name, place_shard(weight, weight.data))
    return model, args.pp_engine


def batches(case, model, context, step):  # micro-batches of 2 sequences, as its collator makes them
    collate = DataCollatorForCLMWithPositionIds(12, model.input_pp_rank, model.output_pp_rank, context)
    ranks = context.get_local_ranks(torch.distributed.get_rank())
    for micro in range(case.micro):
        tokens = tokens_of(case.samples(step, micro, ranks["dp"], 2)).numpy()
        inner = ranks["pp"] not in (model.input_pp_rank, model.output_pp_rank)
        found = collate([{} if inner else {"input_ids": one} for one in tokens])
        yield {name: torch.tensor(one) if isinstance(one, numpy.ndarray) else one for name, one in found.items()}


def subject(case, device):
    context = ParallelContext(case.tp, case.pp, case.dp)
    (plain, engine), outcome = build(case, context), {}
    ddp = {"process_group": context.dp_cp_pg, "broadcast_buffers": False}
    model = DistributedDataParallel(plain, **ddp) if case.dp > 1 else plain
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(case.steps):
        optimizer.zero_grad()
        found = batches(case, plain, context, step)
        outputs = engine.train_batch_iter(model, context.pp_pg, found, case.micro, None)
        sync_tied_weights_gradients(plain, context, None)
        if isinstance(outputs[0]["loss"], torch.Tensor):
            total = torch.stack([output["loss"] for output in outputs]).sum() / case.dp
            torch.distributed.all_reduce(total, group=context.dp_cp_pg)
            outcome[f"loss/{step}"] = Shard(total, (), ())
        for name, weight in plain.named_parameters():
            outcome.setdefault(f"grad/{name}", place_shard(weight, weight.grad.clone()))
        parameters = plain.get_named_params_with_correct_tied()
        outcome[f"grad_norm/{step}"] = clip_grad_norm(context.mp_pg, parameters, 1.0, None)
        optimizer.step()
    return outcome | {f"param/{name}": place_shard(weight, weight.data) for name, weight in plain.named_parameters()}


subject.truth, subject.harmless = "alone", softmax_shift
subject.session = functools.partial(on_cpu, CUDA_DEVICE_MAX_CONNECTIONS="1")
subject.words = {"sp": False, "overlap": False, "gather_again": True, "tied": False, "dtype": "float32"}
subject.words["schedule"] = ("afab", "1f1b")
subject.per_rank = ("nanotron.utils", "nanotron.parallel.pipeline_parallel.state", "nanotron.distributed")
subject.refuses = lambda case: "" if case.dtype == "float32" else "computes its norms in float32"
subject.cases = ("tp=2 dp=2", "tp=2 dp=2 sp=true")
