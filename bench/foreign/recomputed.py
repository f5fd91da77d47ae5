"""Blocks under activation checkpointing, split over tp with functional collectives, compared with themselves alone.

`how` is torch's reentrant or non-reentrant checkpoint of a block, of a part of it, of both nested, or none.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.utils.checkpoint import checkpoint

from shardproof import Shard

REENTRANT, OTHER = partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)
HOW = {
    "other": (OTHER, None),
    "reentrant": (REENTRANT, None),
    "inner": (None, OTHER),
    "nested": (OTHER, OTHER),
    "none": (None, None),
}


class f(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return funcol.all_reduce(dx.contiguous(), "sum", ctx.group), None


class g(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return funcol.all_reduce(x.contiguous(), "sum", group).clone()

    @staticmethod
    def backward(ctx, dx):
        return dx, None


class Block(torch.nn.Module):
    def __init__(self, number, case, rank, group):
        super().__init__()
        self.group, (self.outside, self.inside) = group, HOW[case.how]
        self.hidden = case.inner // case.tp
        part = slice(rank * self.hidden, (rank + 1) * self.hidden)
        gen = torch.Generator().manual_seed(case.seed % 2**50 * 3 + number)
        w1, w2 = (
            torch.randn(2, case.inner, case.width, generator=gen, dtype=torch.float64)
            .mul(0.35)
            .to(getattr(torch, case.dtype))
        )
        b1, b2 = torch.randn(2, max(case.inner, case.width), generator=gen, dtype=torch.float64).mul(0.2).to(w1.dtype)
        self.w1, self.w2 = torch.nn.Parameter(w1[part].clone()), torch.nn.Parameter(w2[part].T.contiguous())
        self.b1, self.b2 = (
            torch.nn.Parameter(b1[: case.inner][part].clone()),
            torch.nn.Parameter(b2[: case.width].clone()),
        )
        self.at = {"w1": (part.start, 0), "w2": (0, part.start), "b1": (part.start,), "b2": (0,)}
        self.whole = {
            "w1": (case.inner, case.width),
            "w2": (case.width, case.inner),
            "b1": (case.inner,),
            "b2": (case.width,),
        }

    def mlp(self, x):
        y = torch.nn.functional.softsign(f.apply(x, self.group) @ self.w1.T + self.b1)
        return y * y.sigmoid()

    def body(self, x):
        y = self.inside(self.mlp, x) if self.inside else self.mlp(x)
        return x + g.apply(y @ self.w2.T, self.group) + self.b2

    def forward(self, x):
        return self.outside(self.body, x) if self.outside else self.body(x)


def subject(case, device):
    mesh = dist.init_device_mesh(device.type, (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    rank, dtype = mesh.get_local_rank("tp"), getattr(torch, case.dtype)
    net = torch.nn.Sequential(*(Block(i, case, rank, mesh.get_group("tp")) for i in range(case.depth)))
    optimizer, outcome = torch.optim.NAdam(net.parameters(), lr=0.004), {}

    def collect(kind, of):
        for i, block in enumerate(net):
            for name, p in block.named_parameters():
                outcome[f"{kind}/{i}.{name}"] = Shard(of(p).clone(), block.at[name], block.whole[name])

    for step in range(case.steps):
        losses = []
        for micro in range(case.micro):
            numbers = case.samples(step, micro, mesh.get_local_rank("dp"), case.rows)
            gens = [torch.Generator().manual_seed(1 + 3 * n + case.seed % 2**50) for n in numbers]
            x = torch.stack([torch.randn(case.width, generator=gen, dtype=torch.float64) for gen in gens]).to(dtype)
            loss = net(x.requires_grad_()).logsumexp(-1).mean() / (case.micro * case.dp)
            loss.backward()
            losses.append(loss.detach())
        total = torch.stack(losses).sum()
        dist.all_reduce(total, group=mesh.get_group("dp"))
        for p in net.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        outcome[f"loss/{step}"] = total
        if step == 0:
            collect("grad", lambda p: p.grad)
        optimizer.step()
        optimizer.zero_grad()
    collect("param", lambda p: p.detach())
    return outcome


subject.truth = "alone"
subject.words = {"width": (7, 10, 41), "inner": (12, 24, 60), "depth": (2, 3, 6), "rows": (3, 4), "how": tuple(HOW)}
subject.cases = ("tp=2 dp=2", "tp=3", "tp=4", "tp=2 how=reentrant", "tp=3 how=nested dp=2")
