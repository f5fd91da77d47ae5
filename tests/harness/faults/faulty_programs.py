"""Programs whose ranks are out of step, each in one way: those of the fault table, and more. Two or three ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from bench.fault_programs import (
    dtypes_differ,
    groups_cross,
    numels_differ,
    orders_differ,
    reduce_ops_differ,
    roots_differ,
    shapes_differ,
    skips,
    splits_differ,
)

__all__ = [
    "alike_groups_cross",
    "both_send_first",
    "dtypes_differ",
    "forms_differ",
    "functional_differs",
    "groups_cross",
    "groups_differ",
    "later_messages_differ",
    "lives_differ",
    "messages_differ",
    "never_waits_alone",
    "nobody_sends",
    "numels_differ",
    "one_ends_two_wait",
    "ops_differ",
    "orders_differ",
    "reduce_ops_differ",
    "roots_differ",
    "sends_into_the_void",
    "shapes_differ",
    "skips",
    "skips_in_the_middle",
    "splits_differ",
    "tags_differ",
    "unnamed_groups_cross",
]


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def skips_in_the_middle(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(ones(3))
    dist.all_reduce(ones(2))


def ops_differ(rank: int) -> None:
    if rank == 0:
        dist.barrier()
    else:
        dist.all_reduce(ones(1))


def forms_differ(rank: int) -> None:
    if rank == 1:
        dist.all_gather([ones(2), ones(2), ones(2)], ones(2))
    else:
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(ones(6), ones(2))


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
