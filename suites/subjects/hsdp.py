"""FSDP2 over a part of the data ranks, replicas over the rest (HSDP), in bfloat16 products with `low`: the network of
`fsdp2`. `reshard=false` keeps gathered parameters from forward to backward (ZeRO-2).

shardproof run "dp=4 replicas=2" --subject shardproof.suites.subjects.hsdp:subject
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardproof.suites.subjects.fsdp2 import dense, train, truth


def subject(case, device):
    shape = (case.replicas, case.dp // case.replicas)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True) if case.low else None
    words = {"mp_policy": policy} if policy else {}
    model = dense(case)
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh, reshard_after_forward=case.reshard, **words)
    return train(case, model, [dist.get_rank()], dist.group.WORLD)


subject.truth, subject.cases = truth, ("dp=4 replicas=2", "dp=4 replicas=2 low=true dtype=float32")
subject.words = {"width": 10, "layers": 2, "micro": 3, "replicas": 2, "low": False, "reshard": True}
subject.compute_dtype = lambda case: "bfloat16" if case.low else None
subject.refuses = lambda case: "has dp alone" if case.world_size > case.dp or case.dp % case.replicas else ""
