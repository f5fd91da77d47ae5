"""torch: a pipeline ends in an error where the gradient of a stage's input is not contiguous.

python docs/findings/torch_pipeline_strides.py      exit status 1 while the defect is there

Two stages on gloo: a linear, and a linear over the other dim, whose gradient of its input is a transposed tensor.
"""

import datetime
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


class Across(nn.Module):
    """A linear over the rows of each sample, [samples, rows, columns] to [samples, columns]."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1, bias=False)

    def forward(self, x):
        return self.linear(x.transpose(1, 2)).squeeze(-1)


def parts():  # the two stages, the same on every rank
    torch.manual_seed(0)
    return [nn.Linear(4, 4, bias=False), Across()]


def rank_main(rank, folder):
    words = {"rank": rank, "world_size": 2, "timeout": datetime.timedelta(seconds=20)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", **words)
    x, model = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1)), parts()[rank]
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, wanted: (y - wanted).square().mean())
    found = "no error"
    try:
        schedule.step(*([x] if rank == 0 else []), **({"target": torch.ones(4, 4)} if rank else {}))
    except RuntimeError as error:
        found = f"RuntimeError: {str(error).splitlines()[0]}"
    pathlib.Path(folder, str(rank)).write_text(found)


if __name__ == "__main__":
    print("torch", torch.__version__.partition("+")[0])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=2)
        found = pathlib.Path(folder, "0").read_text()  # that of stage 1 is a closed connection
    print(f"stage 0: {found}, right no error")
    sys.exit(found != "no error")
