"""Muon under tensor parallelism: shards of gradients are gathered, whole matrices are orthogonalised, and each rank
takes its own part back. Gates and biases are stepped by AdamW.

`kind` is an optimizer of this file, in the dtype of the case, or torch's own, which orthogonalises in bfloat16.
"""

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from shardproof import Shard


def orthogonal(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(Optimizer):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p.grad))
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = orthogonal(p.grad + group["momentum"] * buffer)
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def initial(case):
    gen = torch.Generator().manual_seed(case.seed % 2**31 + 77)
    sizes = {
        "gate": (case.width,),
        "up": (case.inner, case.width),
        "bias": (case.inner,),
        "down": (case.width, case.inner),
    }
    drawn = {n: torch.randn(s, generator=gen, dtype=torch.float64) * 0.4 + (n == "gate") for n, s in sizes.items()}
    return {n: t.to(getattr(torch, case.dtype)) for n, t in drawn.items()}


def gather(part, dim, group):
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


class Tie(torch.autograd.Function):  # sums in one direction, copies in the other
    @staticmethod
    def forward(ctx, x, group, ahead):
        ctx.group, ctx.ahead = group, ahead
        return Tie.total(x, group) if ahead else x.view_as(x)

    @staticmethod
    def total(x, group):
        y = x.clone(memory_format=torch.contiguous_format)
        if group is not None:
            dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        return (grad if ctx.ahead else Tie.total(grad, ctx.group)), None, None


def network(p, x, group):
    h = torch.celu(Tie.apply(x * p["gate"], group, False) @ p["up"].T + p["bias"])
    return x + Tie.apply(h @ p["down"].T, group, True)


def subject(case, device):
    rank, dtype = dist.get_rank(), getattr(torch, case.dtype)
    tp = [dist.new_group(list(r), group_desc="tp") for r in case.axes["tp"]][case.axis_rank("dp", rank)]
    dp = [dist.new_group(list(r), group_desc="dp") for r in case.axes["dp"]][case.axis_rank("tp", rank)]
    many = case.inner // case.tp
    mine = slice(case.axis_rank("tp", rank) * many, (case.axis_rank("tp", rank) + 1) * many)
    cuts = {"up": (mine, slice(None)), "bias": (mine,), "down": (slice(None), mine), "gate": (slice(None),)}
    full = initial(case)
    p = {n: torch.nn.Parameter(t[cuts[n]].clone()) for n, t in full.items()}
    whole = {n: torch.nn.Parameter(full[n].clone()) for n in ("up", "down")}
    kind = Muon if case.kind == "own" else torch.optim.Muon
    muon = kind(whole.values(), lr=case.lr, momentum=0.9)
    adam, out = torch.optim.AdamW([p["gate"], p["bias"]], lr=case.lr), {}

    def shards(kind, of):
        for n, t in p.items():
            at = tuple(cut.start or 0 for cut in cuts[n])
            out[f"{kind}/{n}"] = Shard(of(t).clone(), at, tuple(full[n].shape))

    for step in range(case.steps):
        total = torch.zeros((), dtype=dtype)
        for micro in range(case.micro):
            numbers = case.samples(step, micro, case.axis_rank("dp", rank), case.rows)
            gen = torch.Generator().manual_seed(case.seed % 2**31 + numbers.start * 7)
            x = torch.randn(case.rows, case.width, generator=gen, dtype=torch.float64).to(dtype)
            loss = (network(p, x, tp) - x.cos()).square().mean() / (case.micro * case.dp)
            loss.backward()
            total += loss.detach()
        for t in (total, *(t.grad for t in p.values())):
            dist.all_reduce(t, group=dp)
        out[f"loss/{step}"] = total
        if step == 0:
            shards("grad", lambda t: t.grad)
        for n, t in whole.items():
            t.grad = gather(p[n].grad, 0 if n == "up" else 1, tp)
        muon.step()
        adam.step()
        for n, t in whole.items():
            p[n].data.copy_(t.data[cuts[n]])
        for t in p.values():
            t.grad = None
        shards(f"param_after/{step}", lambda t: t.detach())
    shards("param", lambda t: t.detach())
    return out


subject.truth, subject.cases = "alone", ("tp=2 dp=2", "tp=3", "tp=4", "tp=2")
subject.words = {
    "width": (10, 14, 50),
    "inner": (24, 12, 84),
    "rows": (5, 3),
    "lr": (0.02, 0.001),
    "kind": ("own", "torch"),
}
