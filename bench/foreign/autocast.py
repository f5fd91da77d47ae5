"""Float32 weights under torch.autocast to bfloat16, split over tp. The subject states `compute_dtype`."""

import torch
import torch.distributed as dist
from torch import nn

from shardproof import Shard


class Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.float() if x.dtype == torch.bfloat16 else x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Net(nn.Module):
    def __init__(self, case, cut=slice(None), group=None):
        super().__init__()
        g, self.group = torch.Generator().manual_seed(case.seed % 2**61), group

        def draw(*shape):
            return torch.randn(shape, generator=g, dtype=torch.float64).mul(0.4).to(getattr(torch, case.dtype))

        self.norm, self.up, self.down = nn.LayerNorm(case.width), nn.Linear(1, 1), nn.Linear(1, 1, bias=False)
        self.norm.weight.data, self.norm.bias.data = draw(case.width) + 1, draw(case.width)
        up, bias, down = draw(case.inner, case.width), draw(case.inner), draw(case.width, case.inner)
        self.up.weight.data, self.up.bias.data, self.down.weight.data = up[cut], bias[cut], down[:, cut].contiguous()

    def forward(self, x):
        y = self.norm(x)
        y = self.down(nn.functional.gelu(self.up(y if self.group is None else Part.apply(y, self.group))))
        return x + (y if self.group is None else Meet.apply(y, self.group))


def train(case, net, ranks, whole=lambda name, t: t, add=lambda t: t):
    optimizer, out = torch.optim.SGD(net.parameters(), lr=0.02), {}
    for step in range(case.steps):
        total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            for rank in ranks:
                seeds = [n * 19 + case.seed % 2**40 for n in case.samples(step, micro, rank, case.rows)]
                draws = [
                    torch.randn(case.width, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
                    for s in seeds
                ]
                x = torch.stack(draws).to(total.dtype)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.dtype == "float32"):
                    y = net(x)
                loss = (y.to(total.dtype) - x.flip(0)).square().mean() / (case.micro * case.dp)
                loss.backward()
                total += loss.detach()
        out[f"loss/{step}"] = add(total)
        for name, p in net.named_parameters():
            add(p.grad)
            out |= {f"grad/{name}": whole(name, p.grad.clone())} if step == 0 else {}
        optimizer.step()
        optimizer.zero_grad()
    return out | {f"param/{name}": whole(name, p.detach()) for name, p in net.named_parameters()}


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    many, rank = case.inner // case.tp, mesh.get_local_rank("tp")
    cut = slice(rank * many, (rank + 1) * many)

    def whole(name, t):
        if name.startswith("norm"):
            return t
        dim = int(name == "down.weight")
        shape = [case.inner if d == dim else size for d, size in enumerate(t.shape)]
        return Shard(t, tuple(cut.start if d == dim else 0 for d in range(t.dim())), tuple(shape))

    def add(t):
        dist.all_reduce(t, group=mesh.get_group("dp"))
        return t

    return train(case, Net(case, cut, mesh.get_group("tp")), [mesh.get_local_rank("dp")], whole, add)


def truth(case, device):
    return train(case, Net(case), range(case.dp))


subject.truth, subject.cases = truth, ("tp=2 dp=2", "tp=3", "tp=2")
subject.words = {"width": (10, 7), "inner": (12, 18), "rows": (5, 4)}
subject.dtypes = ("float64", "float32")
subject.compute_dtype = lambda case: "bfloat16" if case.dtype == "float32" else None
subject.refuses = lambda case: (
    "" if case.dtype in subject.dtypes else "the weights are float32, or float64 without autocast"
)
