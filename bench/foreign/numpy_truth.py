"""A Poisson regression whose features are split over tp and rows over dp; its truth is written in numpy."""

import numpy as np
import torch
import torch.distributed as dist

from shardproof import Shard


def data(case, step, micro, rank):
    found = [
        np.random.default_rng([case.seed % 2**32, n]).normal(size=case.features + 1)
        for n in case.samples(step, micro, rank, case.rows)
    ]
    table = np.stack(found)
    return table[:, :-1], np.floor(np.exp(np.abs(table[:, -1])))


def begin(case):
    rng = np.random.default_rng(case.seed % 2**32 + 1)
    return rng.normal(0, 0.2, case.features), rng.normal(0, 0.2, 1)


def truth(case, device):
    dtype = {"float64": np.float64}.get(case.dtype, np.float32)
    (w, b), out = begin(case), {}
    if case.dtype == "bfloat16":
        w, b = (torch.tensor(x).bfloat16().double().numpy() for x in (w, b))
    w, b = w.astype(dtype), b.astype(dtype)
    for step in range(case.steps):
        gw, gb, loss = np.zeros_like(w), np.zeros_like(b), dtype(0)
        for micro in range(case.micro):
            for rank in range(case.dp):
                x, y = (a.astype(dtype) for a in data(case, step, micro, rank))
                z = x @ w + b
                share = dtype(1 / (case.micro * case.dp * case.rows))
                loss += ((np.exp(z) - y * z) * share).sum()
                gw += x.T @ ((np.exp(z) - y) * share)
                gb += ((np.exp(z) - y) * share).sum()
        out[f"loss/{step}"] = torch.tensor(loss)
        if step == 0:
            out |= {"grad/w": torch.tensor(gw), "grad/b": torch.tensor(gb)}
        w, b = w - dtype(0.05) * gw, b - dtype(0.05) * gb
    return out | {"param/w": torch.tensor(w), "param/b": torch.tensor(b)}


def subject(case, device):
    me, dtype = dist.get_rank(), getattr(torch, case.dtype)
    tp = [dist.new_group(list(r), group_desc="tp") for r in case.axes["tp"]][case.axis_rank("dp", me)]
    dp = [dist.new_group(list(r), group_desc="dp") for r in case.axes["dp"]][case.axis_rank("tp", me)]
    edges = np.linspace(0, case.features, case.tp + 1).round().astype(int).tolist()
    low, high = edges[case.axis_rank("tp", me)], edges[case.axis_rank("tp", me) + 1]
    w, b = (torch.tensor(x).to(dtype) for x in begin(case))
    w = w[low:high].clone().requires_grad_()
    b = b.requires_grad_()
    sgd, out = torch.optim.SGD([w, b], lr=0.05), {}
    for step in range(case.steps):
        sgd.zero_grad()
        total = torch.zeros((), dtype=dtype)
        for micro in range(case.micro):
            x, y = (torch.tensor(a).to(dtype) for a in data(case, step, micro, case.axis_rank("dp", me)))
            z = x[:, low:high] @ w
            dist.all_reduce(z.data, group=tp)
            z = z + b
            loss = (z.exp() - y * z).sum() / (case.micro * case.dp * case.rows)
            loss.backward()
            total += loss.detach()
        for t in (total, w.grad, b.grad):
            dist.all_reduce(t, group=dp)
        out[f"loss/{step}"] = total
        if step == 0:
            out |= {"grad/w": Shard(w.grad.clone(), (low,), (case.features,)), "grad/b": b.grad.clone()}
        sgd.step()
    return out | {"param/w": Shard(w.detach(), (low,), (case.features,)), "param/b": b.detach()}


subject.truth, subject.cases = truth, ("tp=2 dp=3", "tp=3", "dp=2", "tp=4 dp=2")
subject.words = {"features": (11, 7), "rows": (6, 5)}
