"""A 1F1B pipeline by hand over stages of unequal depth, times data parallelism. A send is waited for at the
end of its step: a blocking one would wait for a neighbour that sends too.

The truth is the list of layers called in a loop, in float64.
"""

import torch
import torch.distributed as dist

from shardproof import Shard


class Layer(torch.nn.Module):
    def __init__(self, number, case):
        super().__init__()
        g = torch.Generator().manual_seed(1 + number + 100 * (case.seed % 10**6))
        self.mix = torch.nn.Parameter(
            torch.randn(case.width, case.width, generator=g, dtype=torch.float64) / case.width**0.5
        )
        self.shift = torch.nn.Parameter(torch.randn(case.width, generator=g, dtype=torch.float64) / 4)

    def forward(self, x):
        return x + torch.tanh(torch.matmul(x, self.mix) + self.shift)


def stage_layers(case, stage):
    bounds = [0, *(case.depth * (s + 1) // case.pp for s in range(case.pp))]
    return range(bounds[stage], bounds[stage + 1])


def microbatch(case, step, micro, dp_rank):
    got = torch.empty(2, case.rows, case.width, dtype=torch.float64)
    for row, number in enumerate(case.samples(step, micro, dp_rank, case.rows)):
        got[:, row].normal_(generator=torch.Generator().manual_seed(case.seed % 10**6 + 31 * number))
    return got.to(getattr(torch, case.dtype))


def loss_fn(case, y, target):
    return torch.nn.functional.smooth_l1_loss(y, target, beta=0.5) / case.micro / case.dp


def truth(case, device):
    dtype = getattr(torch, case.dtype)
    layers = torch.nn.ModuleList(Layer(i, case) for i in range(case.depth)).to(dtype).double()
    opt, out = torch.optim.Adagrad(layers.parameters(), lr=0.05), {}
    for step in range(case.steps):
        loss = torch.zeros((), dtype=torch.float64)
        for micro in range(case.micro):
            for dp_rank in range(case.dp):
                x, target = microbatch(case, step, micro, dp_rank).double()
                for layer in layers:
                    x = layer(x)
                loss = loss + loss_fn(case, x, target)
        opt.zero_grad()
        loss.backward()
        out[f"loss/{step}"] = loss.detach()
        if step == 0:
            out.update((f"grad/{n}", p.grad.clone()) for n, p in layers.named_parameters())
        opt.step()
    out.update((f"param/{n}", p.detach()) for n, p in layers.named_parameters())
    return out


def subject(case, device):
    rank, dtype = dist.get_rank(), getattr(torch, case.dtype)
    stage, dp_rank = case.axis_rank("pp", rank), case.axis_rank("dp", rank)
    prev, nxt = rank - case.dp, rank + case.dp
    groups = [dist.new_group(list(ranks), group_desc="dp") for ranks in case.axes["dp"]]
    mine = torch.nn.ModuleDict({str(i): Layer(i, case) for i in stage_layers(case, stage)}).to(dtype)
    opt, out = torch.optim.Adagrad(mine.parameters(), lr=0.05), {}
    first, last, sent = stage == 0, stage == case.pp - 1, []

    def forward(step, micro):
        data, target = microbatch(case, step, micro, dp_rank)
        if not first:
            data = torch.empty_like(data)
            dist.recv(data, prev)
        x = data.requires_grad_(not first)
        y = x
        for layer in mine.values():
            y = layer(y)
        if last:
            y = loss_fn(case, y, target)
        else:
            sent.append(dist.isend(y.detach(), nxt))
        return x, y

    def backward(x, y):
        grad = None
        if not last:
            grad = torch.empty_like(y)
            dist.recv(grad, nxt)
        y.backward(grad)
        if not first:
            sent.append(dist.isend(x.grad, prev))
        return y.detach() if last else torch.zeros((), dtype=dtype)

    for step in range(case.steps):
        warm, waiting, loss = min(case.pp - stage - 1, case.micro), [], torch.zeros((), dtype=dtype)
        for micro in range(case.micro):
            waiting.append(forward(step, micro))
            if micro >= warm:
                loss = loss + backward(*waiting.pop(0))
        while waiting:
            loss = loss + backward(*waiting.pop(0))
        while sent:
            sent.pop().wait()
        for p in mine.parameters():
            dist.all_reduce(p.grad, group=groups[stage])
        dist.all_reduce(loss)  # zero on all stages but the last
        out[f"loss/{step}"] = loss
        if step == 0:
            out.update((f"grad/{n}", stage_tensor(p.grad.clone())) for n, p in mine.named_parameters())
        opt.step()
        opt.zero_grad()
    out.update((f"param/{n}", stage_tensor(p.detach())) for n, p in mine.named_parameters())
    return out


def stage_tensor(tensor):  # returned by this stage alone
    return Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


subject.truth = truth
subject.words = {"width": (9, 6, 37), "depth": (5, 4, 11), "rows": (3, 2), "micro": 3}
subject.cases = ("pp=2 dp=2", "pp=3", "pp=4", "pp=2 micro=1")
subject.refuses = lambda case: "stages and data ranks" if case.tp * case.cp > 1 or case.depth < case.pp else ""
