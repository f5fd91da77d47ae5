"""Training in bfloat16 with gradients added up in float32 and float32 masters (the main_grad of Megatron).

Hooks add each micro-batch's gradient to a wide buffer, which is averaged over the data ranks. A float32 or float64 case
has buffers of its own dtype. Masters, moments and the accumulated gradients are returned.
"""

import torch
import torch.distributed as dist
from torch import nn


class Mixer(nn.Module):
    def __init__(self, case):
        super().__init__()
        self.tokens, self.channels = nn.Linear(case.length, case.length), nn.Linear(case.width, case.width)
        self.norm, self.out = nn.LayerNorm(case.width), nn.Linear(case.width, 1)
        self.double()
        for index, p in enumerate(self.parameters()):
            nn.init.trunc_normal_(p, std=0.3, generator=torch.Generator().manual_seed(case.seed % 2**48 + 31 * index))
        self.norm.weight.data += 1
        self.to(getattr(torch, case.dtype))

    def forward(self, x):
        x = x + self.tokens(x.mT).mT.tanh()
        x = x + torch.nn.functional.hardswish(self.channels(self.norm(x)))
        return self.out(x)[..., 0].mean(-1)


class Trainer:
    def __init__(self, case, data_ranks, group=None):
        self.case, self.ranks, self.group = case, data_ranks, group
        self.model = Mixer(case)
        wide = torch.float64 if case.dtype == "float64" else torch.float32
        self.main = {n: p.detach().to(wide).clone() for n, p in self.model.named_parameters()}
        self.grads = {n: torch.zeros_like(t) for n, t in self.main.items()}
        for name, p in self.model.named_parameters():
            p.register_post_accumulate_grad_hook(self.accumulate(name))
        self.adam = torch.optim.AdamW(self.main.values(), lr=case.lr, betas=(0.85, 0.97), eps=1e-6)

    def accumulate(self, name):
        def hook(p):
            self.grads[name] += p.grad
            p.grad = None

        return hook

    def batch(self, step, micro, rank):
        c = self.case
        for n in c.samples(step, micro, rank, c.rows):
            g = torch.Generator().manual_seed(977 * n + c.seed % 2**48)
            yield torch.randn(c.length, c.width, generator=g, dtype=torch.float64), float(n % 4) - 1.5

    def step(self, step):
        c, total = self.case, 0
        for micro in range(c.micro):
            for rank in self.ranks:
                x, y = zip(*self.batch(step, micro, rank), strict=True)
                dtype = getattr(torch, c.dtype)
                error = self.model(torch.stack(x).to(dtype)) - torch.tensor(y, dtype=dtype)
                loss = error.float().square().mean() if c.dtype == "bfloat16" else error.square().mean()
                (loss / c.micro / len(self.ranks)).backward()
                total = total + loss.detach() / c.micro / c.dp
        if self.group is not None:
            flat = torch.cat([g.flatten() for g in self.grads.values()])
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group)
            for g, part in zip(self.grads.values(), flat.split([g.numel() for g in self.grads.values()]), strict=True):
                g.copy_(part.view_as(g))
            dist.all_reduce(total, group=self.group)
        for name, master in self.main.items():
            master.grad = self.grads[name]
        out = {f"loss/{step}": total} | {f"grad/{n}": g.clone() for n, g in self.grads.items() if step == 0}
        self.adam.step()
        for name, p in self.model.named_parameters():
            p.data.copy_(self.main[name])
            self.grads[name].zero_()
            out[f"param_after/{step}/{name}"] = self.main[name].clone()
            for kind in ("exp_avg", "exp_avg_sq"):
                out[f"{kind}_after/{step}/{name}"] = self.adam.state[self.main[name]][kind].clone()
        return out


def subject(case, device):
    group = dist.new_group(list(range(case.dp)), group_desc="dp")
    trainer, outcome = Trainer(case, [dist.get_rank()], group), {}
    for step in range(case.steps):
        outcome |= trainer.step(step)
    return outcome


def truth(case, device):
    trainer, outcome = Trainer(case, range(case.dp)), {}
    for step in range(case.steps):
        outcome |= trainer.step(step)
    return outcome


subject.truth, subject.cases = truth, ("dp=2", "dp=3", "dp=4")
subject.words = {"width": (9, 6, 43), "length": (5, 7, 19), "rows": (4, 3), "lr": (0.01, 0.001)}
subject.refuses = lambda case: "data ranks" if case.world_size > case.dp else ""
