"""A mixture of experts whose experts lie on the data ranks, unequal numbers of them.

Each token goes to its two experts by an all-to-all with uneven sizes, and comes back weighted.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardproof import Shard


def owners(case):  # experts by rank: the first ranks hold one more
    return [case.count // case.dp + (rank < case.count % case.dp) for rank in range(case.dp)]


def params(case):
    def normal(place, *shape):
        return torch.randn(
            *shape, generator=torch.Generator().manual_seed(case.seed % 2**33 + place), dtype=torch.float64
        )

    w, f, e = case.width, case.inner, case.count
    made = dict(
        router=normal(1, e, w),
        up=normal(2, e, w, f) / w**0.5,
        bias=normal(3, e, f) / 3,
        down=normal(4, e, f, w) / f**0.5,
    )
    return {name: tensor.to(getattr(torch, case.dtype)) for name, tensor in made.items()}


def tokens(case, step, micro, rank):
    seeds = [n * 5 + case.seed % 2**33 for n in case.samples(step, micro, rank, case.tokens)]
    x = [torch.randn(case.width, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]
    return torch.stack(x).to(getattr(torch, case.dtype)), torch.tensor(seeds)


def choose(case, router, x, key):
    """Experts [tokens, 2] and their weights; by the number of the token where `router=hash`."""
    probabilities = F.linear(x, router).softmax(-1)
    if case.router == "hash":
        experts = torch.stack([key % case.count, (key + 1 + key // 7 % (case.count - 1)) % case.count], 1)
    else:
        experts = probabilities.topk(2).indices
    weights = probabilities.gather(1, experts)
    return experts, weights / weights.sum(-1, keepdim=True)


def expert(x, up, bias, down):
    return F.silu(x @ up + bias) @ down


def truth(case, device):
    p = {n: t.clone().requires_grad_() for n, t in params(case).items()}
    optimizer, out = torch.optim.AdamW(p.values(), lr=0.01), {}
    for step in range(case.steps):
        total, counts = torch.zeros((), dtype=p["up"].dtype), torch.zeros(case.count, dtype=torch.int64)
        for rank in range(case.dp):
            for micro in range(case.micro):
                x, key = tokens(case, step, micro, rank)
                experts, weights = choose(case, p["router"], x, key)
                y = torch.stack([expert(x, p["up"][e], p["bias"][e], p["down"][e]) for e in range(case.count)], 1)
                mixed = (y.gather(1, experts[..., None].expand(-1, -1, case.width)) * weights[..., None]).sum(1)
                loss = (mixed + x).square().mean() / (case.micro * case.dp)
                loss.backward()
                total += loss.detach()
                counts += torch.bincount(experts.flatten(), minlength=case.count)
        out |= {f"loss/{step}": total, f"load/{step}": counts}
        if step == 0:
            out |= {f"grad/{n}": t.grad.clone() for n, t in p.items()}
        optimizer.step()
        optimizer.zero_grad()
    return out | {f"param/{n}": t.detach() for n, t in p.items()}


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive):
        ctx.sizes = send, receive
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad):
        send, receive = ctx.sizes
        return AllToAll.apply(grad, receive, send), None, None


def layer(case, p, x, key, own):
    experts, weights = choose(case, p["router"], x, key)
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=case.count)
    theirs = torch.empty(case.dp * own[dist.get_rank()], dtype=torch.int64)
    dist.all_to_all_single(theirs, counts, [own[dist.get_rank()]] * case.dp, own)
    theirs = theirs.view(case.dp, -1)
    send, receive = [int(part.sum()) for part in counts.split(own)], theirs.sum(1).tolist()
    rows = AllToAll.apply(x[order // 2], send, receive)
    mine = torch.arange(own[dist.get_rank()]).repeat(case.dp).repeat_interleave(theirs.flatten())
    y = torch.zeros_like(rows)
    for e in range(own[dist.get_rank()]):
        y = y.index_put((mine == e,), expert(rows[mine == e], p["up"][e], p["bias"][e], p["down"][e]))
    back = AllToAll.apply(y, receive, send)
    return (torch.zeros_like(back).index_copy(0, order, back).view(*experts.shape, -1) * weights[..., None]).sum(
        1
    ), counts


def subject(case, device):
    rank, own, full = dist.get_rank(), owners(case), params(case)
    first = sum(own[:rank])
    p = {n: t if n == "router" else t[first : first + own[rank]].clone() for n, t in full.items()}
    p = {n: torch.nn.Parameter(t) for n, t in p.items()}
    optimizer, out = torch.optim.AdamW(p.values(), lr=0.01), {}

    def name_shard(kind, name, t):
        whole = name == "router"
        return {f"{kind}/{name}": t if whole else Shard(t, (first,) + (0,) * (t.dim() - 1), tuple(full[name].shape))}

    for step in range(case.steps):
        optimizer.zero_grad()
        losses, loads = [], []
        for micro in range(case.micro):
            x, key = tokens(case, step, micro, rank)
            mixed, counts = layer(case, p, x, key, own)
            losses.append((mixed + x).square().mean() / (case.micro * case.dp))
            losses[-1].backward()
            loads.append(counts)
        total, load = torch.stack(losses).detach().sum(), sum(loads)
        for tensor in (total, load, p["router"].grad):
            dist.all_reduce(tensor)
        out |= {f"loss/{step}": total, f"load/{step}": load}
        for n, t in p.items():
            out |= name_shard("grad", n, t.grad.clone()) if step == 0 else {}
        optimizer.step()
    for n, t in p.items():
        out |= name_shard("param", n, t.detach())
    return out


subject.truth, subject.cases = truth, ("dp=2 count=5", "dp=3 count=7", "dp=4 count=6", "dp=3 count=5 router=learned")
subject.words = {
    "width": (8, 5, 38),
    "inner": (7, 11, 45),
    "count": 5,
    "tokens": (9, 6, 40),
    "router": ("hash", "learned"),
}
subject.refuses = lambda case: "a router near a tie" if case.router == "learned" and case.dtype == "bfloat16" else ""
