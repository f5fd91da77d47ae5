"""Low-rank adapters beside frozen projections under tensor parallelism.

In a column-parallel layer A is whole and B is split, in a row-parallel one A is split and B is whole. Only adapters are
trained, B with another learning rate than A (LoRA+).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

ALPHA = 3.0
COLUMN, ROW = (0, None, 0), (1, 1, None)  # the dim in which weight, A and B are split


class Enter(torch.autograd.Function):  # whole to whole; the gradients of all ranks are summed
    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return Leave.apply(grad, ctx.mesh), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        work = dist.all_reduce(y := x.contiguous().clone(), group=mesh.get_group(), async_op=True)
        work.wait()
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Adapted(nn.Module):
    def __init__(self, tensors, dims=(None, None, None), mesh=None):
        super().__init__()
        if mesh:
            rank, size = mesh.get_local_rank(), mesh.size()
            tensors = [t if d is None else t.chunk(size, d)[rank].clone() for t, d in zip(tensors, dims, strict=True)]
        self.register_buffer("weight", tensors[0])
        self.a, self.b = map(nn.Parameter, tensors[1:])

    def forward(self, x):
        return x @ self.weight.T + (x @ self.a.T) @ self.b.T * (ALPHA / len(self.a))


class Block(nn.Module):
    def __init__(self, case, mesh=None):
        super().__init__()
        drawn, (w, i, r) = torch.Generator().manual_seed(case.seed % 2**60 * 5 + 3), (case.width, case.inner, case.rank)
        sizes = [(i, w), (r, w), (i, r), (w, i), (r, i), (w, r)]
        made = [torch.randn(s, generator=drawn, dtype=torch.float64).mul(0.4) for s in sizes]
        made = [t.to(getattr(torch, case.dtype)) for t in made]
        self.up, self.down, self.mesh = Adapted(made[:3], COLUMN, mesh), Adapted(made[3:], ROW, mesh), mesh

    def forward(self, x):
        if self.mesh is None:
            return x + self.down(nn.functional.mish(self.up(x)))
        return x + Leave.apply(self.down(nn.functional.mish(self.up(Enter.apply(x, self.mesh)))), self.mesh)


def step_through(case, block, data_ranks, add=lambda t: t, whole=lambda name, t: t):
    adapters, low, found = dict(block.named_parameters()), case.lr, {}
    groups = [
        {"params": [p for n, p in adapters.items() if n[-1] == end], "lr": lr}
        for end, lr in (("a", low), ("b", 4 * low))
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.02)
    for step in range(case.steps):
        total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            for rank in data_ranks:
                seeds = [n * 4099 + case.seed % 2**50 for n in case.samples(step, micro, rank, case.rows)]
                pairs = [
                    torch.randn(2, case.width, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
                    for s in seeds
                ]
                x, y = torch.stack(pairs, 1).to(total.dtype)
                loss = nn.functional.huber_loss(block(x), y) / (case.micro * case.dp)
                loss.backward()
                total += loss.detach()
        found[f"loss/{step}"] = add("", total)
        for name, p in adapters.items():
            add(name, p.grad)
            if step == 0:
                found[f"grad/{name}"] = whole(name, p.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"param/{name}": whole(name, p.detach()) for name, p in adapters.items()}


PARTIAL, SPLIT = ("up.a", "down.b"), {"up.b": 0, "down.a": 1}


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))

    def add(name, t):
        for axis in ("tp", "dp") if name in PARTIAL else ("dp",):
            dist.all_reduce(t, group=mesh.get_group(axis))
        return t

    def whole(name, t):
        if name not in SPLIT:
            return DTensor.from_local(t, mesh["tp"], [Replicate()], run_check=False)
        dim = SPLIT[name]
        shape = [size * case.tp if d == dim else size for d, size in enumerate(t.shape)]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(t, mesh["tp"], [Shard(dim)], shape=torch.Size(shape), stride=stride)

    return step_through(case, Block(case, mesh["tp"]), [mesh.get_local_rank("dp")], add, whole)


def truth(case, device):
    return step_through(case, Block(case), range(case.dp), lambda name, t: t)


subject.truth, subject.cases = truth, ("tp=2 dp=3", "tp=3 inner=15", "tp=2", "tp=4 dp=2 inner=12")
subject.words = {"width": (9, 7), "inner": (14, 10, 15, 12), "rank": (5, 3), "rows": (4, 2), "lr": (2e-3, 1e-4)}
subject.refuses = lambda case: "inner must be a multiple of tp" if case.inner % case.tp else ""
