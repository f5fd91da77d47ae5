"""Differentially private SGD without its noise: gradients of single samples are clipped and summed over dp.

The truth is torch.func's vmap of a gradient, the ranks take sample after sample.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.func import functional_call, grad, vmap

BOUND = 0.35


def net(case):
    model = torch.nn.Sequential(
        torch.nn.Linear(case.width, case.inner), torch.nn.Tanh(), torch.nn.Linear(case.inner, 2)
    )
    values = torch.randn(
        sum(p.numel() for p in model.parameters()),
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(case.seed % 2**62 + 4),
    )
    torch.nn.utils.vector_to_parameters(values / 3, model.double().parameters())
    return model.to(getattr(torch, case.dtype))


def sample(case, number):
    x = torch.randn(
        case.width, generator=torch.Generator().manual_seed(number * 23 + case.seed % 2**40), dtype=torch.float64
    )
    return x.to(getattr(torch, case.dtype)), torch.tensor(number % 2)


def loss_of(model, params, x, y):
    return torch.nn.functional.cross_entropy(functional_call(model, params, (x,)), y)


def truth(case, device):
    model, out = net(case), {}
    params = {n: p.detach() for n, p in model.named_parameters()}
    for step in range(case.steps):
        numbers = [n for m in range(case.micro) for r in range(case.dp) for n in case.samples(step, m, r, case.rows)]
        x, y = map(torch.stack, zip(*(sample(case, n) for n in numbers), strict=True))
        out[f"loss/{step}"] = vmap(partial(loss_of, model, params))(x, y).mean()
        each = vmap(grad(lambda p, x, y: loss_of(model, p, x, y)), in_dims=(None, 0, 0))(params, x, y)
        norms = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
        factor = (BOUND / norms).clamp(max=1)
        total = {n: torch.einsum("n,n...->...", factor, g) / len(numbers) for n, g in each.items()}
        if step == 0:
            out |= {f"grad/{n}": g for n, g in total.items()}
        params = {n: p - 0.5 * total[n] for n, p in params.items()}
    return out | {f"param/{n}": p for n, p in params.items()}


def subject(case, device):
    model, out = net(case), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(case.steps):
        sums, total = (
            [torch.zeros_like(p) for p in model.parameters()],
            torch.zeros((), dtype=getattr(torch, case.dtype)),
        )
        count = case.rows * case.micro * case.dp
        for micro in range(case.micro):
            for number in case.samples(step, micro, dist.get_rank(), case.rows):
                x, y = sample(case, number)
                loss = torch.nn.functional.cross_entropy(model(x[None]), y[None])
                grads = torch.autograd.grad(loss, list(model.parameters()))
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
                for into, g in zip(sums, grads, strict=True):
                    into.add_(g * torch.clamp(BOUND / norm, max=1))
                total += loss.detach() / count
        dist.all_reduce(total)
        for p, g in zip(model.parameters(), sums, strict=True):
            dist.all_reduce(g)
            p.grad = g / count
        out[f"loss/{step}"] = total
        out |= {f"grad/{n}": p.grad.clone() for n, p in model.named_parameters() if step == 0}
        optimizer.step()
    return out | {f"param/{n}": p.detach() for n, p in model.named_parameters()}


subject.truth, subject.cases = truth, ("dp=2", "dp=3", "dp=4")
subject.words = {"width": (7, 5), "inner": (9, 6), "rows": (3, 5)}
subject.refuses = lambda case: "one axis" if case.world_size > case.dp else ""
