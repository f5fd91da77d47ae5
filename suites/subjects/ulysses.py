"""The attention layer of `context` with its sequence split over cp by DeepSpeed's DistributedAttention (Ulysses).

shardproof run "cp=3 dp=2" --subject shardproof.suites.subjects.ulysses:subject
"""

from contextlib import nullcontext

import torch.distributed as dist
from deepspeed import comm
from deepspeed.sequence.layer import DistributedAttention

from shardproof.suites.subjects import context, deepspeed


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.cp), mesh_dim_names=("dp", "cp"))
    comm.init_distributed(dist_backend="gloo", verbose=False)

    def part(x, labels):
        return nullcontext(one.chunk(case.cp, 1)[mesh.get_local_rank("cp")] for one in (x, labels))

    model = context.AttentionModel(case, DistributedAttention(context.causal, mesh.get_group("cp"), 2, 1))
    return context.train(case, model, [mesh.get_local_rank("dp")], part, dist.group.WORLD)


subject.truth, subject.cases = context.truth, ("cp=2", "cp=3 dp=2 dtype=float32")
subject.words, subject.refuses = context.subject.words, context.subject.refuses
subject.per_rank = deepspeed.subject.per_rank
