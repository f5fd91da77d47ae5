"""A training script whose rank 1 diverges from the others in module `1`.

In step 2 it waits until a file `go` is there (at most 60 s) before the all_reduce; in step 3 it leaves it out.
"""

import datetime
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

step = 0


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if dist.get_rank() == 1 and self.number == 1 and step == 3:
            return x
        if dist.get_rank() == 1 and self.number == 1 and step == 2:
            end_s = time.monotonic() + 60
            while time.monotonic() < end_s and not Path("go").exists():
                time.sleep(0.05)
        y = x.detach().clone()
        dist.all_reduce(y)
        return x + y


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=90))
model = nn.Sequential(*(Layer(number) for number in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):  # noqa: B007  (modules read it)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
