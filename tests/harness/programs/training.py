"""A training script that knows nothing of us: DDP, two micro-batches a step, one of them local, and a mesh of two axes.

    training.py STEPS [dropped] [messages] [extra] [kill] [broken]

`dropped`: of three asynchronous calls a step one is waited for, one through its future, and one is not. `messages`: in
every step rank 0 sends two, and rank 1 one. `extra`: one all_reduce more in a module's forward. `kill`: the last rank
kills itself in the last step. `broken`: the recorder fails from then on.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.linear(x))
        if "extra" in sys.argv:
            dist.all_reduce(x.detach().sum())
        return x


def main() -> None:
    dist.init_process_group("gloo")
    rank, steps = dist.get_rank(), int(sys.argv[1])
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Sequential(Layer(), Layer()), process_group=mesh.get_group("dp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(steps):
        with model.no_sync():
            model(torch.randn(3, 5)).square().mean().backward()
        loss = model(torch.randn(3, 5)).square().mean()
        loss.backward()
        if step == steps - 1 and rank == dist.get_world_size() - 1 and "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 1 and "broken" in sys.argv:
            import shardproof.harness.programs.stream  # noqa: PLC0415

            shardproof.harness.programs.stream.event_of = None  # type: ignore[assignment, attr-defined]
        if "dropped" in sys.argv:
            works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
            works[0].wait()
            works[1].get_future().wait()
            del works
        for source in (0, 0, 1) if "messages" in sys.argv else ():
            message = dist.send if rank == source else dist.recv
            message(torch.ones(7), 1 - rank)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=mesh.get_group("tp"))
        if rank == 0:
            print(f"step {step} loss {total.item():.17g}")
    dist.barrier()
    dist.destroy_process_group()


main()
