"""DistributedDataParallel, unmodified: the network of `fsdp2` on every data rank, gradients averaged in buckets.

shardproof run "dp=3 width=7" --subject suites.subjects.ddp:subject
"""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from suites.subjects.fsdp2 import dense, train, truth


def subject(case, device):  # every tensor in full, for every rank has the whole network
    model = DistributedDataParallel(dense(case), bucket_cap_mb=case.bucket_bytes / 2**20)
    outcome = train(case, model, [dist.get_rank()], dist.group.WORLD)
    return {name.replace("module.", ""): tensor for name, tensor in outcome.items()}


subject.truth, subject.cases = truth, ("dp=3", "dp=2 dtype=float32 bucket_bytes=400")
subject.words = {"width": 10, "layers": 2, "micro": 3, "bucket_bytes": 25 * 2**20}
subject.refuses = lambda case: "has data ranks alone" if case.world_size > case.dp else ""
