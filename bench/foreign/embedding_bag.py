"""A recommender: a table of embeddings whose rows are dealt out over tp, bags of uneven length, and a click as label.

A rank looks up its own rows of every bag, sums are scattered over the batch, and the dense part is data parallel there.
Gradients of the table are sparse.
"""

import torch
import torch.distributed as dist
from torch import nn


class Bags(torch.autograd.Function):
    """Sums of this rank's rows for all samples [rows, width] to whole sums of its own samples."""

    @staticmethod
    def forward(ctx, partial):
        parts = [p.contiguous() for p in partial.chunk(dist.get_world_size())]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        return mine

    @staticmethod
    def backward(ctx, grad):
        every = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(every, grad.contiguous())
        return torch.cat(every)


def tables(case):
    draw = torch.Generator().manual_seed(case.seed // 2 + 11)
    table = torch.randn(case.items, case.width, generator=draw, dtype=torch.float64) / 2
    first = torch.randn(case.hidden, case.width, generator=draw, dtype=torch.float64) / 2
    rest = torch.randn(2, case.hidden, generator=draw, dtype=torch.float64)
    return [t.to(getattr(torch, case.dtype)) for t in (table, first, rest[0], rest[1])]


def bags(case, step, micro):  # items in a row, where each bag begins, weights of items, clicks
    items, offsets, weights, clicks = [], [], [], []
    for number in case.samples(step, micro, 0, case.rows):
        draw = torch.Generator().manual_seed(number * 101 + case.seed % 10**9)
        many = 1 + (number * 5 + step) % 6
        offsets.append(sum(map(len, items)))
        items.append(torch.randint(case.items, (many,), generator=draw))
        weights.append(torch.rand(many, generator=draw, dtype=torch.float64) + 0.5)
        clicks.append(float(number % 3 == 0))
    dtype = getattr(torch, case.dtype)
    return torch.cat(items), torch.tensor(offsets), torch.cat(weights).to(dtype), torch.tensor(clicks, dtype=dtype)


def click(x, first, second, bias):
    return nn.functional.gelu(x @ first.t() + bias) @ second


def loss_of(case, scores, clicks):
    return nn.functional.binary_cross_entropy_with_logits(scores, clicks, reduction="sum") / (case.rows * case.micro)


def truth(case, device):
    table, *dense = [nn.Parameter(t) for t in tables(case)]
    sgd, adam, out = torch.optim.SGD([table], lr=0.5), torch.optim.Adam(dense, lr=0.01, eps=1e-5), {}
    for step in range(case.steps):
        total = 0
        for micro in range(case.micro):
            items, offsets, weights, clicks = bags(case, step, micro)
            x = nn.functional.embedding_bag(items, table, offsets, mode="sum", per_sample_weights=weights)
            loss = loss_of(case, click(x, *dense), clicks)
            loss.backward()
            total = total + loss.detach()
        out[f"loss/{step}"] = total
        if step == 0:
            out |= {f"grad/{n}": p.grad.clone() for n, p in zip(NAMES, (table, *dense), strict=True)}
        for optimizer in (sgd, adam):
            optimizer.step()
            optimizer.zero_grad()
    return out | {f"param/{n}": p.detach() for n, p in zip(NAMES, (table, *dense), strict=True)}


NAMES = ("table", "first", "second", "bias")


def subject(case, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    whole, *dense = tables(case)
    mine = torch.arange(rank, case.items, world)  # dealt out in turn: no block, so a full table is returned
    table, dense = nn.Parameter(whole[mine].clone()), [nn.Parameter(t) for t in dense]
    sgd, adam, out = torch.optim.SGD([table], lr=0.5), torch.optim.Adam(dense, lr=0.01, eps=1e-5), {}

    def full(rows):
        placed = torch.zeros(case.items, case.width, dtype=rows.dtype).index_copy(0, mine, rows)
        dist.all_reduce(placed)
        return placed

    for step in range(case.steps):
        total = torch.zeros((), dtype=table.dtype)
        for micro in range(case.micro):
            items, offsets, weights, clicks = bags(case, step, micro)
            bag = torch.bucketize(torch.arange(len(items)), offsets, right=True) - 1
            here = items % world == rank
            ends = torch.bincount(bag[here], minlength=case.rows).cumsum(0)
            starts = torch.cat([ends.new_zeros(1), ends[:-1]])
            partial = nn.functional.embedding_bag(
                items[here] // world, table, starts, mode="sum", per_sample_weights=weights[here], sparse=True
            )
            scores = click(Bags.apply(partial), *dense)
            loss = loss_of(case, scores, clicks.chunk(world)[rank])
            loss.backward()
            total += loss.detach()
        for t in (total, *(p.grad for p in dense)):
            dist.all_reduce(t)
        out[f"loss/{step}"] = total
        if step == 0:
            grads = (full(table.grad.to_dense()), *(p.grad.clone() for p in dense))
            out |= {f"grad/{n}": g for n, g in zip(NAMES, grads, strict=True)}
        for optimizer in (sgd, adam):
            optimizer.step()
            optimizer.zero_grad()
    params = (full(table.detach()), *(p.detach() for p in dense))
    return out | {f"param/{n}": p for n, p in zip(NAMES, params, strict=True)}


subject.truth, subject.cases = truth, ("tp=2", "tp=3", "tp=4")
subject.words = {"items": (29, 17), "width": (5, 7), "hidden": (9, 6), "rows": (12, 24)}
subject.refuses = lambda case: "one axis" if case.world_size > case.tp else ""
