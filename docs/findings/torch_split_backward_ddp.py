"""torch: under zero-bubble schedules stages in DistributedDataParallel never reduce their gradients.

python docs/findings/torch_split_backward_ddp.py      exit status 1 while the defect is there

Two data ranks on gloo, each with both stages of a model. Another schedule is beside it, whose backward is one.
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


def train(schedule, rank, alone):  # gradient of stage 1 after one step, and how a second step ends
    torch.manual_seed(0)
    models = [DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2)]
    stages = [PipelineStage(one, n, 2, torch.device("cpu"), group=alone) for n, one in enumerate(models)]
    steps = getattr(schedules, schedule)(stages, 4, loss_fn=mean_square)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))  # other samples on each rank
    steps.step(x, target=torch.ones(8, 4))
    gradient = models[1].module.weight.grad.clone()
    dist.all_gather(found := [torch.empty_like(gradient) for _ in range(2)], gradient)
    try:
        steps.step(x, target=torch.ones(8, 4))
    except RuntimeError as error:
        return float((found[0] - found[1]).norm()), str(error.__cause__ or error).partition(".")[0]
    return float((found[0] - found[1]).norm()), "no error"


def rank_main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    groups, found = [dist.new_group([one]) for one in range(2)], []
    for schedule in SCHEDULES:
        apart, ended = train(schedule, rank, groups[rank])
        found.append(f"{schedule}: gradients of two ranks differ by {apart:.4f}, right 0; second step: {ended}")
    pathlib.Path(folder, str(rank)).write_text("\n".join(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__.partition("+")[0])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=2)
        found = pathlib.Path(folder, "0").read_text()
    print(found)
    sys.exit(found.count("differ by 0.0000, right 0; second step: no error") < len(SCHEDULES))
