"""Programs whose ranks are out of step, each in one way; run on two or three ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def skips(rank: int) -> None:
    dist.all_reduce(ones(3))
    if rank != 1:
        dist.all_reduce(ones(3))


def skips_in_the_middle(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(ones(3))
    dist.all_reduce(ones(2))


def orders_differ(rank: int) -> None:
    calls = [lambda: dist.all_reduce(ones(4)), lambda: dist.broadcast(ones(4), src=0)]
    for call in reversed(calls) if rank == 2 else calls:
        call()


def ops_differ(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        dist.all_reduce(ones(1))


def numels_differ(rank: int) -> None:
    dist.all_reduce(ones(4 if rank == 1 else 3))


def shapes_differ(rank: int) -> None:
    dist.all_reduce(ones(2, 3) if rank == 1 else ones(3, 2))


def dtypes_differ(rank: int) -> None:
    dist.all_reduce(ones(3).int() if rank == 1 else ones(3))


def reduce_ops_differ(rank: int) -> None:
    dist.all_reduce(ones(3), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)


def roots_differ(rank: int) -> None:
    dist.broadcast(ones(3), src=1 if rank == 1 else 0)


def forms_differ(rank: int) -> None:
    if rank == 1:
        dist.all_gather([ones(2), ones(2), ones(2)], ones(2))
    else:
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(ones(6), ones(2))


def splits_differ(rank: int) -> None:
    sends, receives = [[1, 3], [2, 2]][rank], [[1, 2], [4, 2]][rank]
    dist.all_to_all_single(ones(sum(receives)), ones(sum(sends)), receives, sends)


def groups_cross(rank: int) -> None:
    one, other = dist.new_group([0, 1], group_desc="one"), dist.new_group([0, 1], group_desc="other")
    for group in (one, other) if rank == 0 else (other, one):
        dist.all_reduce(ones(1), group=group)


def unnamed_groups_cross(rank: int) -> None:
    """The groups 2 and 3 of the world are of the same ranks, and nothing but their number distinguishes them."""
    _first, one, other = dist.new_group([0]), dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (one, other) if rank == 0 else (other, one):
        dist.all_reduce(ones(1), group=group)


def alike_groups_cross(rank: int) -> None:
    one, other = dist.new_group([0, 1], group_desc="tp"), dist.new_group([0, 1], group_desc="tp")
    for group in (one, other) if rank == 0 else (other, one):
        dist.all_reduce(ones(1), group=group)


def groups_differ(rank: int) -> None:
    dist.new_group([0, 1] if rank == 0 else [0, 2])


def messages_differ(rank: int) -> None:
    if rank == 0:
        dist.send(ones(3), dst=1)
    else:
        dist.recv(ones(4), src=0)


def later_messages_differ(rank: int) -> None:
    """The sender has sent before, the receiver has not received: their calls count differently."""
    if rank == 1:
        dist.send(ones(3), dst=2)
        dist.send(ones(3), dst=0)
    else:
        dist.recv(ones(4 if rank == 0 else 3), src=1)


def tags_differ(rank: int) -> None:
    if rank == 0:
        dist.send(ones(3), dst=1, tag=7)
    else:
        dist.recv(ones(3), src=0, tag=8)


def both_send_first(rank: int) -> None:
    dist.send(ones(3), dst=1 - rank)
    dist.recv(ones(3), src=1 - rank)


def nobody_sends(rank: int) -> None:
    if rank == 0:
        dist.recv(ones(3))


def never_waits_alone(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(ones(3), async_op=True)


def sends_into_the_void(rank: int) -> None:
    if rank == 0:
        dist.isend(ones(3), dst=1)


def lives_differ(rank: int) -> None:
    if rank == 0:
        dist.destroy_process_group()
        dist.init_process_group()
    dist.all_reduce(ones(3))


def one_ends_two_wait(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(ones(3))
    if rank == 1:
        dist.recv(ones(3), src=2)


def functional_differs(rank: int) -> None:
    functional.all_reduce(ones(3), "max" if rank else "sum", _get_default_group()).sum()
