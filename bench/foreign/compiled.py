"""torch.compile around the pieces of a split model: the hidden layer of a block over tp, and the loss of a rank.

`backend` is one of those that need no compiler. Its truth is the subject on one rank.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

from shardproof import Shard


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return collectives.wait_tensor(collectives.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return collectives.wait_tensor(collectives.all_reduce(grad, "sum", ctx.group)), None


def hidden_layer(x, up, bias):
    return torch.nn.functional.gelu(x @ up + bias) * torch.sigmoid(x @ up)


def distance(y, x):
    return torch.where(y > x, (y - x).square(), (y - x).abs()).mean()


def subject(case, device):
    compiled = {f: torch.compile(f, backend=case.backend) for f in (hidden_layer, distance)}
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    tp, dp, rank, many = mesh.get_group("tp"), mesh.get_group("dp"), mesh.get_local_rank("tp"), case.inner // case.tp
    shapes = {"up": (case.width, case.inner), "bias": (case.inner,), "down": (case.inner, case.width)}
    cut = {"up": 1, "bias": 0, "down": 0}
    gen, p = torch.Generator().manual_seed(case.seed % 2**55 + 9), {}
    for name, shape in shapes.items():
        value = torch.randn(*shape, generator=gen, dtype=torch.float64).mul(0.4).to(getattr(torch, case.dtype))
        p[name] = torch.nn.Parameter(value.narrow(cut[name], rank * many, many).clone())
    optimizer, out = torch.optim.Adadelta(p.values(), lr=0.5), {}

    def return_shards(kind, of):
        for name, value in p.items():
            at = tuple(rank * many if dim == cut[name] else 0 for dim in range(value.dim()))
            out[f"{kind}/{name}"] = Shard(of(value).clone(), at, shapes[name])

    for step in range(case.steps):
        total = torch.zeros((), dtype=p["up"].dtype)
        for micro in range(case.micro):
            numbers = case.samples(step, micro, mesh.get_local_rank("dp"), case.rows)
            x = torch.stack(
                [
                    torch.cos(torch.arange(1, case.width + 1).double() ** 1.5 * (n + 1.7 + case.seed % 7))
                    for n in numbers
                ]
            )
            x = x.to(total.dtype)
            h = compiled[hidden_layer](SumGradients.apply(x, tp), p["up"], p["bias"])
            loss = compiled[distance](SumOverRanks.apply(h @ p["down"], tp), x) / (case.micro * case.dp)
            loss.backward()
            total += loss.detach()
        for t in (total, *(value.grad for value in p.values())):
            dist.all_reduce(t, group=dp)
        out[f"loss/{step}"] = total
        if step == 0:
            return_shards("grad", lambda value: value.grad)
        optimizer.step()
        optimizer.zero_grad()
    return_shards("param", lambda value: value.detach())
    return out


subject.truth, subject.cases = "alone", ("tp=2 dp=2", "tp=3", "dp=3", "tp=2")
subject.words = {"width": (7, 9), "inner": (12, 18), "rows": (3, 5), "backend": ("eager", "aot_eager")}
