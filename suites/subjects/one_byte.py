"""Tensors that travel in one byte an element, with a scale for each block of a row: int8 gradients and fp8 weights."""

import torch
import torch.distributed as dist

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantise(x, wire, block):  # rows in `wire`, and the scale of each block of a row
    scales = x.unflatten(-1, (-1, block)).abs().amax(-1) / LARGEST[wire]
    small = x / scales.clamp(min=1e-30).repeat_interleave(block, -1)
    return (small if wire.is_floating_point else small.round()).to(wire), scales


def restore(small, scales, block):
    return small.to(scales.dtype) * scales.repeat_interleave(block, -1)


def round_trip(x, wire, block):
    return restore(*quantise(x, wire, block), block)


def gather_weights(weight, block, group):  # the rows of all ranks, each as fp8 makes it
    small, scales = quantise(weight, torch.float8_e4m3fn, block)
    whole = []
    for part in (small.view(torch.uint8), scales):
        dist.all_gather(found := [torch.empty_like(part) for _ in range(group.size())], part, group=group)
        whole.append(torch.cat(found))
    return restore(whole[0].view(torch.float8_e4m3fn), whole[1], block)


def reduce_gradient(gradient, block, group):  # the sum over ranks of the rows that this rank owns
    found = []
    for part in quantise(gradient, torch.int8, block):
        dist.all_to_all_single(received := torch.empty_like(part), part, group=group)
        found.append(received.unflatten(0, (group.size(), -1)))
    return restore(*found, block).sum(0)
