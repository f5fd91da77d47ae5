"""ZeRO-1: gradients are summed into equal parts of buckets (reduce-scatter), each rank steps its parts, and the new
parameters are gathered. Works on tp ranks too, which hold columns of the first matrix. Gradients are clipped.
"""

import torch
import torch.distributed as dist

from shardproof import Shard

BUCKET = 64  # elements
SPLIT = {"w1": 1, "b1": 0, "w2": 0}


class Buckets:
    """Parameters in buckets, the last of them first, as their gradients become ready."""

    def __init__(self, parameters, group):
        self.group, self.n = group, dist.get_world_size(group)
        self.lists, size = [[]], 0
        for p in reversed(parameters):
            if size and size + p.numel() > BUCKET:
                self.lists.append([])
                size = 0
            self.lists[-1].append(p)
            size += p.numel()
        self.parts = [torch.nn.Parameter(self.part(self.flat([p.data for p in ps]))) for ps in self.lists]

    def flat(self, tensors):
        whole = torch.cat([t.reshape(-1) for t in tensors])
        return torch.cat([whole, whole.new_zeros(-len(whole) % self.n)])

    def part(self, whole):
        return whole.chunk(self.n)[dist.get_rank(self.group)].clone()

    def sum_gradients(self):
        works = []
        for ps, part in zip(self.lists, self.parts, strict=True):
            part.grad = torch.empty_like(part)
            flat = self.flat([p.grad for p in ps])
            works.append((dist.reduce_scatter_tensor(part.grad, flat, group=self.group, async_op=True), flat))
        for work, _ in works:
            work.wait()

    def gather_buckets(self, of):
        for ps, part in zip(self.lists, self.parts, strict=True):
            whole = torch.empty(part.numel() * self.n, dtype=part.dtype)
            dist.all_gather_into_tensor(whole, of(part).contiguous(), group=self.group)
            for p, t in zip(
                ps, whole.split([p.numel() for p in ps] + [len(whole) - sum(p.numel() for p in ps)]), strict=False
            ):
                yield p, t.view_as(p)


def weights(case):
    gen = torch.Generator().manual_seed(case.seed + 2)
    new = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)  # noqa: E731
    made = {"w1": new(case.width, case.inner) / 3, "b1": new(case.inner) / 2, "w2": new(case.inner, case.width) / 3}
    return {n: t.to(getattr(torch, case.dtype)) for n, t in (made | {"b2": new(case.width) / 2}).items()}


def inputs(case, step, micro, dp_rank):
    numbers = torch.tensor(list(case.samples(step, micro, dp_rank, case.rows)), dtype=torch.float64)
    x = torch.sin(
        (numbers[:, None] + 1.3 + case.seed % 89) * torch.arange(1, case.width + 1, dtype=torch.float64) ** 1.1
    )
    return x.to(getattr(torch, case.dtype)), (numbers % 5 + 1).to(getattr(torch, case.dtype))[:, None]


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def objective(case, w, x, scale, group=None):
    hidden = torch.relu(x @ w["w1"] + w["b1"]) @ w["w2"]
    y = (hidden if group is None else SumForward.apply(hidden, group)) + w["b2"]
    return ((y - x).pow(2) * scale).mean() / (case.micro * case.dp)


def clip(norm):
    return 1.0 / torch.clamp(norm / 0.7, min=1.0)


def subject(case, device):
    dtype, tp_rank, dp_rank = (
        getattr(torch, case.dtype),
        case.axis_rank("tp", dist.get_rank()),
        case.axis_rank("dp", dist.get_rank()),
    )
    tp = [dist.new_group(list(r), group_desc="tp") for r in case.axes["tp"]][dp_rank]
    dp = [dist.new_group(list(r), group_desc="dp") for r in case.axes["dp"]][tp_rank]
    full, wide = weights(case), case.inner // case.tp
    w = {n: t.narrow(SPLIT[n], tp_rank * wide, wide).clone() if n in SPLIT else t for n, t in full.items()}
    w = {n: torch.nn.Parameter(t.contiguous()) for n, t in w.items()}
    names = {p: n for n, p in w.items()}
    buckets, out = Buckets(list(w.values()), dp), {}
    optimizer = torch.optim.SGD(buckets.parts, lr=0.2, momentum=0.5)

    def return_shards(kind, of):
        for p, t in buckets.gather_buckets(of):
            n = names[p]
            at = [tp_rank * wide if SPLIT.get(n) == dim else 0 for dim in range(t.dim())]
            out[f"{kind}/{n}"] = Shard(t.clone(), tuple(at), tuple(full[n].shape))

    for step in range(case.steps):
        total = torch.zeros((), dtype=dtype)
        for micro in range(case.micro):
            loss = objective(case, w, *inputs(case, step, micro, dp_rank), tp)
            loss.backward()
            total += loss.detach()
        buckets.sum_gradients()
        dist.all_reduce(total, group=dp)
        out[f"loss/{step}"] = total
        if step == 0:
            return_shards("grad", lambda part: part.grad)
        squares = torch.zeros((), dtype=dtype)
        for p, g in buckets.gather_buckets(lambda part: part.grad):
            squares += g.square().sum() / (1 if names[p] in SPLIT else case.tp)
        dist.all_reduce(squares, group=tp)
        out[f"grad_norm/{step}"] = squares.sqrt()
        for part in buckets.parts:
            part.grad *= clip(squares.sqrt())
        optimizer.step()
        for p, t in buckets.gather_buckets(lambda part: part.detach()):
            p.data.copy_(t)
            p.grad = None
    return_shards("param", lambda part: part.detach())
    return out


def truth(case, device):
    w, out = {n: t.requires_grad_() for n, t in weights(case).items()}, {}
    optimizer = torch.optim.SGD(w.values(), lr=0.2, momentum=0.5)
    for step in range(case.steps):
        optimizer.zero_grad()
        pairs = [(micro, rank) for micro in range(case.micro) for rank in range(case.dp)]
        loss = sum(objective(case, w, *inputs(case, step, *pair)) for pair in pairs)
        loss.backward()
        out[f"loss/{step}"] = loss.detach()
        out |= {f"grad/{n}": t.grad.clone() for n, t in w.items() if step == 0}
        norm = torch.stack([t.grad.square().sum() for t in w.values()]).sum().sqrt()
        out[f"grad_norm/{step}"] = norm
        for t in w.values():
            t.grad *= clip(norm)
        optimizer.step()
    return out | {f"param/{n}": t.detach() for n, t in w.items()}


subject.truth, subject.cases = truth, ("dp=3", "tp=2 dp=2", "dp=2", "tp=3 dp=2")
subject.words = {"width": (9, 7), "inner": (12, 18), "rows": (3, 2)}
