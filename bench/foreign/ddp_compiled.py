"""DistributedDataParallel under torch.compile, as training scripts write it: the wrapped model is what is compiled."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def model_of(case):
    layers = [torch.nn.Linear(case.width, case.inner), torch.nn.Softplus(), torch.nn.Linear(case.inner, 3)]
    for number, p in enumerate(torch.nn.Sequential(*layers).parameters()):
        g = torch.Generator().manual_seed(case.seed % 2**60 + number)
        p.data = torch.randn(p.shape, generator=g, dtype=torch.float64).mul(0.3).to(getattr(torch, case.dtype))
    return torch.nn.Sequential(*layers)


def fit(case, step_of, ranks, total_of):
    model = model_of(case)
    run = step_of(model)
    optimizer, out = torch.optim.AdamW(model.parameters(), lr=0.01), {}
    for step in range(case.steps):
        losses = []
        for micro in range(case.micro):
            for rank in ranks:
                numbers = torch.tensor(case.samples(step, micro, rank, case.rows), dtype=torch.float64)
                x = (numbers[:, None] * 0.37 + torch.arange(case.width) * 1.9 + case.seed % 31).cos()
                y = run(x.to(getattr(torch, case.dtype)))
                loss = (y - numbers[:, None].sin().to(y.dtype)).square().mean() / case.micro / len(ranks)
                loss.backward()
                losses.append(loss.detach())
        out[f"loss/{step}"] = total_of(torch.stack(losses).sum())
        out |= {f"grad/{n}": p.grad.clone() for n, p in model.named_parameters() if step == 0}
        optimizer.step()
        optimizer.zero_grad()
    return out | {f"param/{n}": p.detach() for n, p in model.named_parameters()}


def subject(case, device):
    def average(t):
        dist.all_reduce(t, op=dist.ReduceOp.AVG)
        return t

    def parallel(model):
        return torch.compile(DistributedDataParallel(model), backend=case.backend)

    return fit(case, parallel, [dist.get_rank()], average)


subject.truth = lambda case, device: fit(case, lambda model: model, range(case.dp), lambda t: t)
subject.words = {"width": (5, 8), "inner": (9, 6), "rows": (4, 3), "backend": ("eager", "aot_eager")}
subject.cases = ("dp=2", "dp=3")
subject.refuses = lambda case: "dp alone" if case.world_size > case.dp else ""
