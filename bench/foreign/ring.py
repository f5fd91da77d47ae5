"""Ring attention: keys and values go round over cp, and a softmax is merged hop by hop. The gradients of all that
travels are sent back by autograd, so that no formula of a backward is needed. Rows are masked unevenly.
"""

import math

import torch
import torch.distributed as dist

from shardproof import Shard

NAMES = ("wq", "wk", "wv", "wo", "bias")


class Pass(torch.autograd.Function):  # to the next rank; its gradient comes back from there
    @staticmethod
    def forward(ctx, both, group, before, behind):
        ctx.rest = group, before, behind
        return _send_around(both, group, before, behind)

    @staticmethod
    def backward(ctx, grad):
        group, before, behind = ctx.rest
        return _send_around(grad, group, behind, before), None, None, None


def _send_around(tensor, group, source, target):
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    todo = [dist.P2POp(dist.isend, tensor.contiguous(), target, group), dist.P2POp(dist.irecv, out, source, group)]
    for work in dist.batch_isend_irecv(todo):
        work.wait()
    return out


def draw_normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed % 2**62), dtype=torch.float64)


def start(case, dtype):
    scale = {"wo": case.inner**-0.5, "bias": 0.5}
    shapes = {name: (case.width, case.inner) for name in NAMES[:3]} | {
        "wo": (case.inner, case.width),
        "bias": (case.width,),
    }
    make = {
        n: draw_normal(case.seed * 17 + i, *shapes[n]) * scale.get(n, case.width**-0.5) for i, n in enumerate(NAMES)
    }
    return [make[n].to(dtype).requires_grad_() for n in NAMES]


def data(case, step, micro, dp_rank, dtype):
    numbers = list(case.samples(step, micro, dp_rank, case.rows))
    x = torch.stack([draw_normal(10**7 + n + case.seed, case.length, case.width) for n in numbers]).to(dtype)
    length = torch.tensor([case.length - n * 7 % 5 for n in numbers])  # of each row; later places do not count
    return x, torch.arange(case.length) < length[:, None]


def attend(q, k, v, hops, here):  # here: positions of q; hops yield positions of k and v, own ones first
    top, below, above = torch.full_like(q[..., :1], -math.inf), 0.0, 0.0
    for positions, k_now, v_now in hops(k, v):
        allowed = positions[None, :] <= here[:, None]
        score = (q @ k_now.transpose(1, 2)).mul(1 / math.sqrt(q.shape[-1])).masked_fill(~allowed, -math.inf)
        peak = torch.maximum(top, score.detach().amax(-1, keepdim=True))
        shrink, weight = (top - peak).exp(), (score - peak).exp()
        below, above, top = below * shrink + weight.sum(-1, keepdim=True), above * shrink + weight @ v_now, peak
    return above / below


def train(case, dtype, ranks, here, hops, add):
    weights, out = start(case, dtype), {}
    optimizer = torch.optim.SGD(weights, lr=0.3, nesterov=True, momentum=0.8)
    for step in range(case.steps):
        batches = [data(case, step, micro, rank, dtype) for micro in range(case.micro) for rank in ranks]
        count = add(torch.tensor(sum(int(seen[:, here].sum()) for _, seen in batches)))
        total = torch.zeros((), dtype=dtype)
        for x, seen in batches:
            wq, wk, wv, wo, bias = weights
            mine = x[:, here]
            y = attend(mine @ wq, mine @ wk, mine @ wv, hops, here) @ wo + bias
            loss = ((y - mine.flip(-1)).pow(2).mean(-1) * seen[:, here]).sum() / count
            loss.backward()
            total += loss.detach()
        for weight in weights:
            add(weight.grad)
        out |= {f"loss/{step}": add(total), f"tokens/{step}": count}
        out |= {f"grad/{n}": w.grad.clone() for n, w in zip(NAMES, weights, strict=True) if step == 0}
        optimizer.step()
        optimizer.zero_grad()
    return out | {f"param/{n}": w.detach() for n, w in zip(NAMES, weights, strict=True)}


def subject(case, device):
    me, (ring, _) = (
        dist.get_rank(),
        dist.new_subgroups_by_enumeration(list(map(list, case.axes["cp"])), group_desc="cp"),
    )
    members, size = dist.get_process_group_ranks(ring), case.length // case.cp
    place = members.index(me)
    before, behind = members[place - 1], members[(place + 1) % len(members)]

    def hops(k, v):
        both = torch.stack((k, v))
        for hop in range(case.cp):
            if hop:
                both = Pass.apply(both, ring, before, behind)
            first = (place - hop) % case.cp * size
            yield torch.arange(first, first + size), both[0], both[1]

    def add(tensor):
        dist.all_reduce(tensor)
        return tensor

    here = torch.arange(place * size, (place + 1) * size)
    out = train(case, getattr(torch, case.dtype), [case.axis_rank("dp", me)], here, hops, add)
    whole = {n: tuple(t.shape) for n, t in out.items() if n.startswith("param/")}
    return out | {n: Shard(out[n], (0,) * len(shape), shape) for n, shape in whole.items()}


def truth(case, device):
    every = torch.arange(case.length)
    return train(case, torch.float64, range(case.dp), every, lambda k, v: [(every, k, v)], lambda tensor: tensor)


subject.truth, subject.cases = truth, ("cp=2", "cp=3 dp=2", "cp=4", "cp=2 dp=3")
subject.words = {"width": (7, 10, 42), "inner": (9, 5, 30), "length": (12, 48), "rows": (2, 3)}
