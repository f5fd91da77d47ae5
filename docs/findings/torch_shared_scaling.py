"""torch: a pipeline divides the gradient of a tensor that two stages of a rank share by the micro-batches twice.

python docs/findings/torch_shared_scaling.py      exit status 1 while the defect is there

One process has both stages of a model, as rank 0 of a V has its first and its last one. They share one linear.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules


def mean_square(y, wanted):
    return (y - wanted).square().mean()


def gradient(schedule):  # of the shared weight, by a schedule or, without one, in one pass
    torch.manual_seed(0)
    shared = nn.Linear(4, 4, bias=False)
    first, last = nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(4, 4), shared)
    x, wanted = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.ones(8, 4)
    if schedule:
        stages = [PipelineStage(one, number, 2, torch.device("cpu")) for number, one in enumerate((first, last))]
        getattr(schedules, schedule)(stages, 4, loss_fn=mean_square).step(x, target=wanted)
    else:
        mean_square(last(first(x)), wanted).backward()
    return shared.weight.grad


if __name__ == "__main__":
    print("torch", torch.__version__.partition("+")[0])
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        right, ratios = gradient(""), []
        for schedule in ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
            ratios.append(float(gradient(schedule).norm() / right.norm()))
            print(f"{schedule}, 4 micro-batches: gradient {ratios[-1]:.4f} of the right one, right 1.0000")
        dist.destroy_process_group()
    sys.exit(any(abs(ratio - 1) > 1e-4 for ratio in ratios))
