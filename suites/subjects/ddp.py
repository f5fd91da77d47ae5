"""DistributedDataParallel, unmodified: the network of `fsdp2` on every data rank, gradients averaged in buckets.
`hook` is a communication hook of torch, `sharded` its ZeroRedundancyOptimizer.

shardproof run "dp=3 width=7 hook=fp16_compress dtype=float32" --subject shardproof.suites.subjects.ddp:subject
"""

import warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
from torch.nn.parallel import DistributedDataParallel

from shardproof.suites.subjects.fsdp2 import dense, train

with warnings.catch_warnings(action="ignore"):  # torch's own, at import
    from torch.distributed.optim import ZeroRedundancyOptimizer

LOW = {"fp16_compress": "float16", "bf16_compress": "bfloat16"}


def optimizer_of(case):  # with a low hook small steps: parameters are judged in the case's dtype, gradients are rounded
    return (torch.optim.SGD, 0.001) if case.hook in LOW else (torch.optim.AdamW, 0.01)


def subject(case, device):  # every tensor in full, for every rank has the whole network
    model = DistributedDataParallel(dense(case), bucket_cap_mb=case.bucket_bytes / 2**20)
    if case.hook != "none":
        register_ddp_comm_hook(DDPCommHookType[case.hook.upper()], model, dist.group.WORLD)
    kind, lr = optimizer_of(case)
    sharded = ZeroRedundancyOptimizer(model.parameters(), kind, lr=lr) if case.sharded else None
    outcome = train(case, model, [dist.get_rank()], dist.group.WORLD, sharded or kind(model.parameters(), lr=lr))
    return {name.replace("module.", ""): tensor for name, tensor in outcome.items()}


def truth(case, device):
    model, (kind, lr) = dense(case), optimizer_of(case)
    return train(case, model, range(case.dp), optimizer=kind(model.parameters(), lr=lr))


subject.truth, subject.cases = truth, ("dp=3", "dp=2 dtype=float32 bucket_bytes=400")
subject.words = {"width": 10, "layers": 2, "micro": 3, "bucket_bytes": 25 * 2**20, "sharded": False}
subject.words |= {"hook": ("none", "allreduce", *LOW)}
subject.wire_dtype = lambda case: LOW.get(case.hook) if case.dp > 1 else None
subject.refuses = lambda case: "has data ranks alone" if case.world_size > case.dp else ""
