"""Megatron's sequence parallelism where the sequence does not divide by the ranks: the first ranks hold one token more.

Norms and residuals lie on slices of tokens, the MLP on slices of features. Slices are padded to travel.
"""

import torch
import torch.distributed as dist
from torch import nn

from shardproof import Shard


def slices(length, parts):
    sizes = [length // parts + (i < length % parts) for i in range(parts)]
    return sizes, [sum(sizes[:i]) for i in range(parts)]


class Gather(torch.autograd.Function):  # [my tokens, ..] -> [all tokens, ..]; backward adds up and keeps mine
    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        return gather(x, sizes, group)

    @staticmethod
    def backward(ctx, g):
        return scatter(g, ctx.sizes, ctx.group), None, None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        return scatter(x, sizes, group)

    @staticmethod
    def backward(ctx, g):
        return gather(g, ctx.sizes, ctx.group), None, None


def gather(x, sizes, group):
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    whole = x.new_empty(len(sizes) * max(sizes), *x.shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(whole.chunk(len(sizes)), sizes, strict=True)])


def scatter(x, sizes, group):
    parts = [torch.cat([p, p.new_zeros(max(sizes) - len(p), *p.shape[1:])]) for p in x.split(sizes)]
    mine = x.new_empty(max(sizes), *x.shape[1:])
    dist.reduce_scatter_tensor(mine, torch.cat(parts), group=group)
    return mine[: sizes[dist.get_rank(group)]]


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(case.width), nn.LayerNorm(case.width)
        self.up, self.down = nn.Linear(case.width, case.inner), nn.Linear(case.inner, case.width)
        self.double()
        generator = torch.Generator().manual_seed(case.seed + 17)
        for weight in self.parameters():
            nn.init.normal_(weight, 0.1, 0.3, generator=generator)
        self.to(getattr(torch, case.dtype))
        self.enter = self.leave = lambda x: x

    def forward(self, x):
        hidden = torch.nn.functional.silu(self.up(self.enter(self.norm(x))))
        return self.last(x + self.leave(hidden @ self.down.weight.T) + self.down.bias)


def batch(case, step, micro, dp_rank):  # [tokens, rows, width]
    got = []
    for number in case.samples(step, micro, dp_rank, case.rows):
        generator = torch.Generator().manual_seed(number + 90001 * (case.seed % 97))
        got.append(torch.randn(2, case.length, case.width, generator=generator, dtype=torch.float64))
    return torch.stack(got, 2).to(getattr(torch, case.dtype))


def fit(case, net, dp_ranks, keep=lambda x: x, reduce=lambda model, total: None):
    optimizer, out = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1), {}
    for step in range(case.steps):
        total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            for dp_rank in dp_ranks:
                x, y = map(keep, batch(case, step, micro, dp_rank))
                count = case.length * case.rows * case.width * case.micro * case.dp
                loss = (net(x) - y).pow(2).sum() / count
                loss.backward()
                total += loss.detach()
        reduce(net, total)
        out[f"loss/{step}"] = total
        out |= {f"grad/{n}": w.grad.clone() for n, w in net.named_parameters() if step == 0}
        optimizer.step()
        optimizer.zero_grad()
    return out | {f"param/{n}": w.detach() for n, w in net.named_parameters()}


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    tp, rank = mesh.get_group("tp"), mesh.get_local_rank("tp")
    net, (sizes, firsts) = Net(case), slices(case.length, case.tp)
    many, starts = slices(case.inner, case.tp)
    mine = slice(starts[rank], starts[rank] + many[rank])
    net.up.weight = nn.Parameter(net.up.weight.detach()[mine].clone())
    net.up.bias = nn.Parameter(net.up.bias.detach()[mine].clone())
    net.down.weight = nn.Parameter(net.down.weight.detach()[:, mine].clone())
    net.enter = lambda x: Gather.apply(x, sizes, tp)
    net.leave = lambda x: Scatter.apply(x, sizes, tp)

    def reduce(model, total):
        for name, weight in model.named_parameters():
            if name not in ("up.weight", "up.bias", "down.weight"):  # each rank saw its own tokens
                dist.all_reduce(weight.grad, group=tp)
            dist.all_reduce(weight.grad, group=mesh.get_group("dp"))
        dist.all_reduce(total)

    part = slice(firsts[rank], firsts[rank] + sizes[rank])
    out = fit(case, net, [mesh.get_local_rank("dp")], lambda x: x[part], reduce)
    at = {"up.weight": ((mine.start, 0), (case.inner, case.width)), "up.bias": ((mine.start,), (case.inner,))}
    at["down.weight"] = ((0, mine.start), (case.width, case.inner))
    return {n: Shard(t, *at[n.split("/")[1]]) if n.split("/")[1] in at else t for n, t in out.items()}


subject.truth, subject.cases = lambda case, device: fit(case, Net(case), range(case.dp)), ("tp=2 dp=2", "tp=3", "tp=4")
subject.words = {"width": (11, 6, 45), "inner": (13, 22, 90), "length": (7, 9, 35), "rows": (3, 2)}
