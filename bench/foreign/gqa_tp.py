"""Grouped-query attention with its heads over tp. Where there are fewer kv heads than ranks, neighbours share a kv head
and add up its gradients. The truth computes in float64, whatever the case says.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardproof import Shard


def initial(case):
    draw, head = torch.Generator().manual_seed(case.seed * 31 + 5), case.head_dim
    sizes = {"q": (case.heads * head, case.width), "k": (case.kv_heads * head, case.width)}
    sizes |= {"v": sizes["k"], "qb": (case.heads * head,), "kb": (case.kv_heads * head,), "vb": (case.kv_heads * head,)}
    sizes |= {"o": (case.width, case.heads * head), "ob": (case.width,)}
    return {n: torch.randn(s, generator=draw, dtype=torch.float64) * s[-1] ** -0.5 for n, s in sizes.items()}


def rows(case, step, micro, dp_rank):
    numbers = case.samples(step, micro, dp_rank, case.rows)
    draws = [torch.Generator().manual_seed(7000 + case.seed % 1000 + 13 * number) for number in numbers]
    return torch.stack([torch.randn(case.length, case.width, generator=draw, dtype=torch.float64) for draw in draws])


def attention(w, x, head):
    q, k, v = (F.linear(x, w[n], w[n + "b"]).unflatten(-1, (-1, head)).transpose(1, 2) for n in "qkv")
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    return F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), w["o"])


def truth(case, device):
    rounded = getattr(torch, case.dtype)  # weights as they are stored, and all arithmetic in float64
    w = {n: t.to(rounded).double().requires_grad_() for n, t in initial(case).items()}
    optimizer, out = torch.optim.SGD(w.values(), lr=0.05, momentum=0.9), {}
    for step in range(case.steps):
        optimizer.zero_grad()
        xs = [rows(case, step, m, d).to(rounded).double() for m in range(case.micro) for d in range(case.dp)]
        losses = [(attention(w, x, case.head_dim) + w["ob"] - x.roll(1, -1)).square().mean() / len(xs) for x in xs]
        out[f"loss/{step}"] = sum(losses).detach()
        sum(losses).backward()
        out |= {f"grad/{n}": t.grad.clone() for n, t in w.items() if step == 0}
        optimizer.step()
    return out | {f"param/{n}": t.detach() for n, t in w.items()}


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


def my_rows(case, name, rank):  # the first of its rows, which are features of heads, and their number
    if name[0] == "q":
        return rank * case.heads // case.tp * case.head_dim, case.heads // case.tp * case.head_dim
    many = max(case.kv_heads // case.tp, 1)
    return rank * case.kv_heads // case.tp * case.head_dim, many * case.head_dim


def subject(case, device):
    me, dtype = dist.get_rank(), getattr(torch, case.dtype)
    tp_lists = [list(ranks) for ranks in case.axes["tp"]]
    tp, _ = dist.new_subgroups_by_enumeration(tp_lists, group_desc="tp")
    dp, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in case.axes["dp"]], group_desc="dp")
    tp_rank, sharing = case.axis_rank("tp", me), max(case.tp // case.kv_heads, 1)
    alike = [ranks[i : i + sharing] for ranks in tp_lists for i in range(0, case.tp, sharing)]
    same_kv, _ = dist.new_subgroups_by_enumeration(alike, group_desc="kv")
    full, mine, place = initial(case), {}, {}
    for n, t in full.items():
        first, many = (0, case.width) if n == "ob" else my_rows(case, "q" if n == "o" else n, tp_rank)
        dim = 1 if n == "o" else 0
        mine[n] = t.to(dtype).narrow(dim, first, many).clone().requires_grad_()
        place[n] = (0, first) if n == "o" else (first, 0)[: t.dim()]
    optimizer, out = torch.optim.SGD(mine.values(), lr=0.05, momentum=0.9), {}

    def shards(kind, of):
        return {f"{kind}/{n}": Shard(of(t).clone(), place[n], tuple(full[n].shape)) for n, t in mine.items()}

    for step in range(case.steps):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=dtype)
        for micro in range(case.micro):
            x = rows(case, step, micro, case.axis_rank("dp", me)).to(dtype)
            part = attention(mine, Enter.apply(x, tp), case.head_dim)
            dist.all_reduce(part.detach(), group=tp)
            loss = (part + mine["ob"] - x.roll(1, -1)).square().mean() / (case.micro * case.dp)
            loss.backward()
            total += loss.detach()
        for n, t in mine.items():
            if n[0] in "kv" and sharing > 1:
                dist.all_reduce(t.grad, group=same_kv)
            dist.all_reduce(t.grad, group=dp)
        dist.all_reduce(total, group=dp)
        out[f"loss/{step}"] = total
        out |= shards("grad", lambda t: t.grad) if step == 0 else {}
        optimizer.step()
    return out | shards("param", lambda t: t.detach())


subject.truth, subject.cases = truth, ("tp=2 dp=3", "tp=4 kv_heads=2", "tp=3 kv_heads=3 dp=2", "tp=6 kv_heads=3")
subject.words = {
    "width": (14, 10, 66),
    "heads": 12,
    "kv_heads": (6, 2, 3),
    "head_dim": (5, 3, 11),
    "length": (9, 7, 33),
}
subject.words |= {"rows": (2, 3)}
subject.refuses = lambda case: (
    "needs whole heads" if 12 % case.tp or case.kv_heads % case.tp and case.tp % case.kv_heads else ""
)
