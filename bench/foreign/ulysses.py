"""Attention by DeepSpeed's Ulysses: tokens are exchanged for heads and back, one all-to-all each way.

The same module serves truth and ranks, in the dtype of the case.
"""

import torch
import torch.distributed as dist
from torch import nn


def exchange(x, group, split, join):
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group), split)]
    return torch.cat(_AllToAll.apply(group, *parts), join)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *parts):
        ctx.group = group
        got = [torch.empty_like(part) for part in parts]
        dist.all_to_all(got, list(parts), group=group)
        return tuple(got)

    @staticmethod
    def backward(ctx, *grads):
        return None, *_AllToAll.apply(ctx.group, *(g.contiguous() for g in grads))


class Layer(nn.Module):
    def __init__(self, case, group=None):
        super().__init__()
        self.group, self.heads, self.head_dim = group, case.heads, case.head_dim
        self.norm = nn.RMSNorm(case.width, eps=1e-5)
        self.qkv, self.out = (
            nn.Linear(case.width, 3 * case.heads * case.head_dim),
            nn.Linear(case.heads * case.head_dim, case.width),
        )

    def forward(self, x):  # [rows, my tokens, width]
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, self.head_dim))
        if self.group is not None:
            qkv = exchange(qkv, self.group, 3, 1)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # [rows, heads, tokens, head]
        scores = q @ k.mT * self.head_dim**-0.5
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=x.dtype).triu(1)
        y = (scores.softmax(-1) @ v).transpose(1, 2)
        if self.group is not None:
            y = exchange(y, self.group, 1, 2)
        return x + self.out(y.flatten(2))


def make_model(case, group=None):
    model = Layer(case, group)
    for i, (_, p) in enumerate(sorted(model.named_parameters())):
        noise = torch.randn(
            p.shape, generator=torch.Generator().manual_seed(100 * case.seed % 2**40 + i), dtype=torch.float64
        )
        p.data = (noise * 0.2 + (p.shape == (case.width,))).to(getattr(torch, case.dtype))
    return model


def run_step(case, model, data_ranks, cp_rank=0):
    out, cp = {}, 1 if model.group is None else case.cp
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    tokens = case.length // cp
    for step in range(case.steps):
        sums = []
        for rank in data_ranks:
            for micro in range(case.micro):
                data = []
                for n in case.samples(step, micro, rank, case.rows):
                    g = torch.Generator().manual_seed(case.seed * 1009 % 2**40 + n)
                    data.append(torch.randn(case.length, case.width, generator=g, dtype=torch.float64))
                x = torch.stack(data).to(getattr(torch, case.dtype))
                x = x[:, cp_rank * tokens : (cp_rank + 1) * tokens]
                loss = (model(x).sin() * x.cos()).mean() / (case.micro * case.dp * cp)
                loss.backward()
                sums.append(loss.detach())
        total = torch.stack(sums).sum()
        if model.group is not None:
            dist.all_reduce(total)
            flat = torch.cat([p.grad.flatten() for p in model.parameters()])
            dist.all_reduce(flat)
            for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
                p.grad.copy_(g.view_as(p))
        out[f"loss/{step}"] = total
        if step == 0:
            out.update({f"grad/{n}": p.grad.detach().clone() for n, p in model.named_parameters()})
        opt.step()
        opt.zero_grad(set_to_none=True)
        out.update({f"param_after/{step}/{n}": p.detach().clone() for n, p in model.named_parameters()})
        for kind in ("exp_avg", "exp_avg_sq"):
            states = {n: opt.state[p][kind].clone() for n, p in model.named_parameters()}
            out.update({f"{kind}_after/{step}/{n}": t for n, t in states.items()})
    return out | {f"param/{n}": p.detach() for n, p in model.named_parameters()}


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.cp), mesh_dim_names=("dp", "cp"))
    model = make_model(case, mesh.get_group("cp"))
    return run_step(case, model, [mesh.get_local_rank("dp")], mesh.get_local_rank("cp"))


subject.truth = lambda case, device: run_step(case, make_model(case), range(case.dp))
subject.words = {"width": (9, 15, 50), "heads": (6, 12), "head_dim": (5, 4), "length": (12, 36), "rows": (2, 3)}
subject.cases = ("cp=2 dp=2", "cp=3", "cp=3 dp=2", "cp=2 dp=3")
