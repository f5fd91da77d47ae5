"""How a model enters a region that is split over an axis and leaves it, with the conjugate calls in backward. With the
group None, as in one process, each returns its tensor.

x = enter(x, tp)       every rank has x; its gradient is the sum of all ranks' gradients
y = leave(y, tp)       the sum over ranks; its gradient is that of every term
x = gather(x, tp, 1)   parts of dim 1 in one tensor; its gradient is summed, and each rank gets its part
y = scatter(y, tp, 1)  the sum over ranks, of which each rank gets a part of dim 1; parts of its gradient are gathered
a = collect(x, cp)     the tensors of all ranks in a new first dim, on every rank
"""

import torch
import torch.distributed as dist


def _sum(x, group):
    dist.all_reduce(x := x.clone(memory_format=torch.contiguous_format), group=group)
    return x


def _gather(x, group, dim):
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _scatter(x, group, dim):
    parts = [part.contiguous() for part in x.chunk(group.size(), dim)]
    dist.reduce_scatter(out := torch.empty_like(parts[0]), parts, group=group)
    return out


def _own(x, group):
    return _sum(x, group)[group.rank()]


def _collect(x, group):
    return _gather(x[None], group, 0)


def _function(forward, backward):  # a function of autograd: what each direction does with x, the group and a dim
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *place):
            ctx.place = place
            return forward(x, *place)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient, *ctx.place), *(None for _ in ctx.place)

    return lambda x, *place: Function.apply(x, *place) if place[0] else x


enter, leave = _function(lambda x, _: x.view_as(x), _sum), _function(_sum, lambda gradient, _: gradient)
gather, scatter, collect = _function(_gather, _scatter), _function(_scatter, _gather), _function(_collect, _own)
