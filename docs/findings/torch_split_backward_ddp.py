"""torch: under zero-bubble schedules stages in DistributedDataParallel never reduce their gradients.

python docs/findings/torch_split_backward_ddp.py      exit status 1 while the defect is there

Two data ranks on gloo, each with both stages of a model. The first schedule does not split its backward.
"""

import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

SCHEDULES = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


def mean_square(y, wanted):
    return (y - wanted).square().mean()


def distance(schedule, rank, alone):  # of the gradients of both ranks after a step
    torch.manual_seed(0)
    models = [DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2)]
    stages = [PipelineStage(one, n, 2, torch.device("cpu"), group=alone) for n, one in enumerate(models)]
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))  # other samples on each rank
    getattr(schedules, schedule)(stages, 4, loss_fn=mean_square).step(x, target=torch.ones(8, 4))
    gradient = models[1].module.weight.grad
    dist.all_gather(found := [torch.empty_like(gradient) for _ in range(2)], gradient)
    return float((found[0] - found[1]).norm())


def rank_main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    groups = [dist.new_group([one]) for one in range(2)]
    found = [(schedule, distance(schedule, rank, groups[rank])) for schedule in SCHEDULES]
    lines = (f"{schedule}: gradients of both ranks differ by {apart:.4f}, right 0.0000" for schedule, apart in found)
    pathlib.Path(folder, str(rank)).write_text("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__.partition("+")[0])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=2)
        found = pathlib.Path(folder, "0").read_text()
    print(found)
    sys.exit(found.count("differ by 0.0000") < len(SCHEDULES))
