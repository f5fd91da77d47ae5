"""InternEvo's InternLM2 under its communicators and its ZeRO-1: modes mtp, msp, fsp over tp, and isp, whose sequences
and weights (`weights` ranks) are split. Compared with itself on one rank. Some defects (FINDINGS.md) are mended here,
and left by `mended=false` (gradients tp times too small), `table=hidden` (of isp) and `gathered=true`.
INTERNEVO=checkout shardproof run "tp=2 dp=2 kind=fsp" --subject shardproof.suites.subjects.internevo:subject
"""

import warnings
from unittest import mock

import torch
import torch.distributed as dist
from transformers import modeling_utils

from shardproof import Shard, softmax_shift
from shardproof.suites.subjects.checkout import checkout, fill, on_cpu, tokens_of

older = mock.patch.object(modeling_utils, "shard_checkpoint", None, create=True)  # is not in transformers 5
with checkout("INTERNEVO", stand_ins="requests datasets boto3"), older, warnings.catch_warnings(action="ignore"):
    from internlm.core.context import ParallelMode
    from internlm.core.context import global_context as gpc
    from internlm.core.parallel.shard import split_data_for_sequence_parallel
    from internlm.model.losses.ce_loss import InternLoss
    from internlm.model.modeling_internlm2 import InternLM2
    from internlm.model.modules.embedding import Embedding1D
    from internlm.solver.optimizer import HybridZeroOptimizer
    from internlm.train import pipeline

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 8, "num_kv_attention_heads": 4, "vocab_size": 48}
SIZES |= {"multiple_of": 8, "no_bias": True, "embed_grad_scale": 1}
SIZES["dropout_selective_checkpoint"] = False
SCALER = {"fp16": {"initial_scale": 1, "min_scale": 1, "growth_interval": 2}, "growth_factor": 2}
SCALER |= {"backoff_factor": 0.5, "hysteresis": 2, "max_scale": 2}


def configure(case):  # what launch.py reads and completes
    ranks = min(case.weights or case.tp, case.world_size) if case.kind == "isp" else 1
    parallel = {"tensor": {"size": case.tp, "mode": case.kind}, "zero1": {"size": min(case.zero, case.world_size)}}
    parallel["weight"] = {"size": ranks, "overlap": case.overlap, "early_reduce_scatter_release": True}
    model = {"dtype": torch.float32, "checkpoint": False, "use_flash_attn": False, "parallel_output": not case.gathered}
    zero = {"overlap_sync_grad": False, "overlap_sync_param": False, "reduce_bucket_size": 10**6, "clip_grad_norm": 0.0}
    config = {"parallel": parallel, "model": model, "hybrid_zero_optimizer": zero, "grad_scaler": SCALER}
    config |= {"data": {"micro_num": case.micro, "use_packed_dataset": False}, "ckpt": {"need_metadata": False}}
    config |= {"cpu_offloading": {"enable": False, "num_layers": 0}, "isp_num_layers": 2}
    gpc.load_config(config | {"reduce_comm_dtype": torch.float32})
    gpc.init_global_dist(dist.get_rank(), case.world_size, "gloo", "localhost", 0)
    gpc.init_parallel_groups()
    gpc._cpu_groups = gpc._groups  # made for GPUs alone, but called for tensors on a CPU


def build(case):
    model = InternLM2(**SIZES, mlp_ratio=1.25, first=True, last=True)
    if case.kind == "isp" and case.table == "vocabulary":
        model.tok_embeddings = Embedding1D(48, 32, vocab_parallel=True)
    model.to(getattr(torch, case.dtype))
    for name, weight in model.named_parameters():
        fill(case, name, [place_shard(weight, weight.data)])
    pipeline.set_parallel_attr_for_param_groups(model)
    return model, pipeline.initialize_parallel_communicator(model)


def place_shard(weight, tensor):  # as InternEvo marks it
    first = getattr(weight, "offset", None) or [0] * tensor.dim()
    return Shard(tensor, tuple(first), tuple(getattr(weight, "complete_size", tensor.shape)))


def loss_of(case, model, step, micro):
    tokens = tokens_of(case.samples(step, micro, gpc.get_local_rank(ParallelMode.DATA), case.rows))
    data, labels = {"input_ids": tokens[:, :-1], "indexes": torch.arange(12)}, tokens[:, 1:]
    if case.kind == "isp":
        data, labels = split_data_for_sequence_parallel(data, labels)
    return InternLoss(parallel_output=not case.gathered)(model(**data, max_seqlen=12), labels) / case.micro


def subject(case, device):
    configure(case)
    (model, communicator), outcome = build(case), {}
    names = {weight: name for name, weight in model.named_parameters()}
    adam = torch.optim.AdamW(pipeline.create_param_groups(model, 0.0), lr=0.01)
    words = {"grad_scal_cfg": gpc.config.grad_scaler, "zero_cfg": gpc.config.hybrid_zero_optimizer}
    optimizer = HybridZeroOptimizer(adam, **words, isp_communicator=communicator)

    def note_seen(*_):  # the gradients that it is about to drop: in ZeRO-1 those of this rank's parameters
        for weight, name in names.items():
            if weight.grad is not None:
                outcome.setdefault(f"grad/{name}", place_shard(weight, weight.grad.clone()))
        forget()

    forget, optimizer.zero_grad = optimizer.zero_grad, note_seen

    def note_call(what, *args):  # as its scheduler does, for overlap
        for hook in pipeline.get_scheduler_hooks(None, optimizer, communicator):
            getattr(hook, what)(None, *args)

    for step in range(case.steps):
        total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            optimizer.skip_grad_reduce = micro < case.micro - 1
            note_call("before_forward", None)
            loss = loss_of(case, model, step, micro)
            total += loss.detach()
            note_call("before_backward", None, None)
            optimizer.backward(loss)
            note_call("after_backward", None)
        for weight, name in names.items() if case.mended else ():
            if case.kind == "isp" or (case.kind != "mtp" and "norm" in name):
                weight.grad *= case.tp
        dist.all_reduce(total, group=gpc.get_group(ParallelMode.DATA))
        outcome[f"loss/{step}"] = total / case.dp
        optimizer.step()
    return outcome | {f"param/{name}": place_shard(weight, weight.data) for weight, name in names.items()}


subject.truth, subject.session, subject.harmless = "alone", on_cpu, softmax_shift
subject.words = {"kind": ("mtp", "msp", "fsp", "isp"), "zero": 1, "weights": 0, "rows": 1, "overlap": False}
subject.words |= {"mended": True, "table": ("vocabulary", "hidden"), "gathered": False, "dtype": "float32"}
subject.per_rank = "core.context.parallel_context", "utils.megatron_timers", "model.modules.linear"
subject.per_rank = tuple(f"internlm.{name}" for name in subject.per_rank)
subject.refuses = lambda case: "is parallel over tp and dp" if case.world_size > case.tp * case.dp else ""
subject.cases = ("tp=2 dp=2", "tp=2 dp=2 kind=fsp")
