"""A small convolutional network with batch norm whose statistics are those of all data ranks, of unequal batches.

Welford's merge of means and squares in forward, two sums in backward; running statistics are returned too.
"""

import torch
import torch.distributed as dist
from torch import nn

EPS, MOMENTUM = 1e-5, 0.2


class SyncNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, running):
        dims, dtype = [0, *range(2, x.dim())], x.dtype
        x = x.float() if dtype == torch.bfloat16 else x  # statistics are float32 at least, as torch's own
        count = torch.tensor([x.numel() / x.shape[1]])
        mine = torch.cat([count.to(x.dtype), x.mean(dims), x.var(dims, unbiased=False)])
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        counts, means, variances = torch.stack(every).split([1, x.shape[1], x.shape[1]], 1)
        n = counts.sum()
        mean = (counts * means).sum(0) / n
        variance = (counts * (variances + (means - mean).square())).sum(0) / n
        running[0].mul_(1 - MOMENTUM).add_(MOMENTUM * mean)
        running[1].mul_(1 - MOMENTUM).add_(MOMENTUM * variance * n / (n - 1))
        wide = [1, -1] + [1] * (x.dim() - 2)
        scale = (variance + EPS).rsqrt()
        normed = (x - mean.view(wide)) * scale.view(wide)
        ctx.save_for_backward(normed, weight, scale, n)
        return (normed * weight.view(wide) + bias.view(wide)).to(dtype)

    @staticmethod
    def backward(ctx, grad):
        normed, weight, scale, n = ctx.saved_tensors
        dims, wide = [0, *range(2, grad.dim())], [1, -1] + [1] * (grad.dim() - 2)
        low, grad = grad.dtype, grad.to(normed.dtype)
        sums = torch.stack([grad.sum(dims), (grad * normed).sum(dims)])
        own = sums.clone()
        dist.all_reduce(sums)
        inner = grad - sums[0].view(wide) / n - normed * sums[1].view(wide) / n
        return (inner * (weight * scale).view(wide)).to(low), own[1].to(low), own[0].to(low), None


class Norm(nn.BatchNorm2d):
    def forward(self, x):
        return SyncNorm.apply(x, self.weight, self.bias, (self.running_mean, self.running_var))


def network(case, norm):
    net = nn.Sequential(
        nn.Conv2d(3, case.channels, 3, padding=1, bias=False),
        norm(case.channels, eps=EPS, momentum=MOMENTUM),
        nn.SiLU(),
        nn.Conv2d(case.channels, 5, (2, 3), stride=2),
        norm(5, eps=EPS, momentum=MOMENTUM),
        nn.Flatten(),
        nn.LazyLinear(4),
    )
    net(torch.zeros(2, 3, case.height, case.height + 1)) if norm is nn.BatchNorm2d else None
    return net


def fill(case, net):
    gen = torch.Generator().manual_seed(case.seed ^ 0x5EED)
    with torch.no_grad():
        for p in net.parameters():
            p.data = (torch.randn(p.shape, generator=gen, dtype=torch.float64) * 0.25 + (p.dim() == 1) * 0.6).to(
                p.dtype
            )
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    return net


def build(case, norm):
    net = network(case, nn.BatchNorm2d).to(getattr(torch, case.dtype))  # which sizes the lazy layer
    if norm is not nn.BatchNorm2d:
        for place in (1, 4):
            net[place] = norm(net[place].num_features).to(net[place].weight.dtype)
    return fill(case, net)


def images(case, step, rank):  # a rank has one image more than the rank before it
    first = case.samples(step, 0, 0, 100).start
    numbers = range(first + 10 * rank, first + 10 * rank + case.rows + rank)
    seeds = [case.seed % 2**20 + 7 * n for n in numbers]
    size = (3, case.height, case.height + 1)
    x = [torch.randn(size, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]
    return torch.stack(x).to(getattr(torch, case.dtype)), torch.tensor(seeds) % 4


def fit(case, net, ranks, whole, add):
    optimizer, out = torch.optim.RMSprop(net.parameters(), lr=0.003, eps=1e-3), {}
    for step in range(case.steps):
        x, y = (torch.cat(parts) for parts in zip(*(images(case, step, rank) for rank in ranks), strict=True))
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum", label_smoothing=0.1) / whole
        loss.backward()
        out[f"loss/{step}"] = add(loss.detach())
        for name, p in net.named_parameters():
            add(p.grad)
            if step == 0:
                out[f"grad/{name}"] = p.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        out |= {f"running/{step}/{name}": b.clone() for name, b in net.named_buffers() if "running" in name}
    return out | {f"param/{name}": p.detach() for name, p in net.named_parameters()}


def number(case):
    return sum(case.rows + rank for rank in range(case.dp))


def subject(case, device):
    def add(t):
        dist.all_reduce(t)
        return t

    return fit(case, build(case, Norm), [dist.get_rank()], number(case), add)


subject.truth = lambda case, device: fit(case, build(case, nn.BatchNorm2d), range(case.dp), number(case), lambda t: t)
subject.words, subject.cases = (
    {"channels": (7, 4), "height": (6, 5), "rows": (2, 3), "micro": 1},
    ("dp=2", "dp=3", "dp=4"),
)
subject.refuses = lambda case: "takes one micro-batch of dp" if case.micro > 1 or case.world_size > case.dp else ""
