"""10,000 steps of a small program, which prints the most memory it has held, in bytes, after 6,000 and at the end.

After 6,000 steps a recorder that forgets has filled all that it keeps: its calls, and its entries into modules.
"""

import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(11))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10_000):
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = torch.ones(1)
    dist.all_reduce(loss)
    if step + 1 in (6_000, 10_000):
        print(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)
dist.destroy_process_group()
