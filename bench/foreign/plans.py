"""torch's own plans for DTensors: a classifier over tp, its gradients averaged over dp by hand, its norm clipped."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def classifier(case):
    torch.manual_seed(case.seed)
    net = nn.Sequential(
        nn.Linear(case.width, case.inner), nn.LeakyReLU(0.2), nn.Linear(case.inner, case.classes)
    ).double()
    net[2].bias.data += torch.arange(case.classes) / 7
    return net.to(getattr(torch, case.dtype))


def batch(case, step, micro, rank):
    numbers = torch.tensor(case.samples(step, micro, rank, case.rows))
    phases = torch.arange(case.width, dtype=torch.float64) + 1 + case.seed % 13 / 13
    return torch.sin(numbers[:, None] * phases.sqrt() + phases).to(getattr(torch, case.dtype)), numbers % case.classes


def train(case, net, ranks, average):
    optimizer, out = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False), {}
    for step in range(case.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            for rank in ranks:
                x, y = batch(case, step, micro, rank)
                loss = nn.functional.cross_entropy(net(x), y) / case.micro / len(ranks)
                loss.backward()
                total += loss.detach()
        out[f"loss/{step}"] = average(total)
        for name, p in net.named_parameters():
            average(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)
            if step == 0:
                out[f"grad/{name}"] = p.grad.clone()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.2, foreach=False)
        out[f"grad_norm/{step}"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
    return out | {f"param/{name}": p.detach() for name, p in net.named_parameters()}


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    net = classifier(case)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()})

    def average(tensor):
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        return tensor

    return train(case, net, [mesh.get_local_rank("dp")], average)


subject.truth = lambda case, device: train(case, classifier(case), range(case.dp), lambda tensor: tensor)
subject.words = {"width": (6, 9), "inner": (13, 10), "classes": (5, 7), "rows": (4, 3)}
subject.cases = ("tp=2", "tp=3", "tp=2 dp=2")
