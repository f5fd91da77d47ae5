"""Convolutions over a picture whose rows are dealt out unevenly: ranks exchange the rows at their edges (halos).

Backward sends the gradients of the borrowed rows home. The truth convolves whole pictures, in float64.
"""

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F


def extent(case, rank):
    return case.height * rank // case.cp, case.height * (rank + 1) // case.cp


def swap(up, down, group, ranks, me):
    """Rows that the rank above sends down and the rank below sends up, zeros at the edges of the picture."""
    from_above, from_below, todo = torch.zeros_like(up), torch.zeros_like(down), []
    if me > 0:
        todo += [
            dist.P2POp(dist.isend, up.contiguous(), ranks[me - 1], group),
            dist.P2POp(dist.irecv, from_above, ranks[me - 1], group),
        ]
    if me < len(ranks) - 1:
        todo += [
            dist.P2POp(dist.isend, down.contiguous(), ranks[me + 1], group),
            dist.P2POp(dist.irecv, from_below, ranks[me + 1], group),
        ]
    for request in dist.batch_isend_irecv(todo) if todo else ():
        request.wait()
    return from_above, from_below


class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wide, group, ranks, me):  # x [pictures, channels, my rows, columns]
        ctx.rest = wide, group, ranks, me
        above, below = swap(x[:, :, :wide], x[:, :, -wide:], group, ranks, me)
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx, grad):
        wide, group, ranks, me = ctx.rest
        inner = grad[:, :, wide:-wide].clone()
        above, below = swap(grad[:, :, :wide], grad[:, :, -wide:], group, ranks, me)
        inner[:, :, :wide] += above
        inner[:, :, -wide:] += below
        return inner, None, None, None, None


def weights(case):
    draw = np.random.default_rng(case.seed)
    shapes = {
        "first": (case.channels, 2, 5, 3),
        "gain": (case.channels, 1, 1),
        "last": (3, case.channels, 3, 3),
        "bias": (3,),
    }
    return {n: torch.from_numpy(draw.normal(0, 0.3, s)).to(getattr(torch, case.dtype)) for n, s in shapes.items()}


def pictures(case, step, micro, rank):
    shape = (2, case.height, case.columns)
    made = [
        np.random.default_rng((case.seed, n)).normal(size=shape) for n in case.samples(step, micro, rank, case.rows)
    ]
    return torch.from_numpy(np.stack(made)).to(getattr(torch, case.dtype))


def net(w, x, halo):
    x = F.conv2d(halo(x, 2), w["first"], padding=(0, 1))
    x = torch.nn.functional.gelu(x, approximate="tanh") * w["gain"]
    return F.conv2d(halo(x, 1), w["last"], w["bias"], padding=(0, 1))


def loss(case, y):
    return y.tanh().pow(3).sum() / (case.rows * case.micro * case.dp * 10) + y.pow(2).sum() / (
        case.rows * case.micro * case.dp * 100
    )


def truth(case, device):
    w = {n: t.double().requires_grad_() for n, t in weights(case).items()}
    sgd, out = torch.optim.SGD(w.values(), lr=0.01, weight_decay=0.1), {}
    for step in range(case.steps):
        sgd.zero_grad()
        total = torch.zeros(())
        for micro in range(case.micro):
            for rank in range(case.dp):
                x = pictures(case, step, micro, rank).double()
                one = loss(case, net(w, x, lambda x, wide: F.pad(x, (0, 0, wide, wide))))
                one.backward()
                total = total + one.detach()
        out[f"loss/{step}"] = total
        out |= {f"grad/{n}": t.grad.clone() for n, t in w.items() if step == 0}
        sgd.step()
    return out | {f"param/{n}": t.detach() for n, t in w.items()}


def subject(case, device):
    mine = next(list(ranks) for ranks in case.axes["cp"] if dist.get_rank() in ranks)
    groups = [dist.new_group(list(ranks), group_desc="cp") for ranks in case.axes["cp"]]
    group, me = groups[case.axis_rank("dp", dist.get_rank())], mine.index(dist.get_rank())
    low, high = extent(case, me)
    w, out = {n: t.requires_grad_() for n, t in weights(case).items()}, {}
    sgd = torch.optim.SGD(w.values(), lr=0.01, weight_decay=0.1)
    for step in range(case.steps):
        total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            x = pictures(case, step, micro, case.axis_rank("dp", dist.get_rank()))[:, :, low:high]
            one = loss(case, net(w, x, lambda x, wide: Halo.apply(x, wide, group, mine, me)))
            one.backward()
            total += one.detach()
        handles = [dist.all_reduce(t, async_op=True) for t in (total, *(t.grad for t in w.values()))]
        for handle in handles:
            handle.wait()
        out[f"loss/{step}"] = total
        out |= {f"grad/{n}": t.grad.clone() for n, t in w.items() if step == 0}
        sgd.step()
        sgd.zero_grad()
    return out | {f"param/{n}": t.detach() for n, t in w.items()}


subject.truth, subject.cases = truth, ("cp=2 dp=2", "cp=3", "cp=4", "cp=2")
subject.words = {"channels": (4, 5), "height": (11, 9, 8), "columns": (7, 6), "rows": (2, 3)}
