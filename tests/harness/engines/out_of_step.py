"""Programs whose ranks are out of step, each in one way, and the error of each."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from tests.harness.engines import programs


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def skips(rank: int) -> None:
    dist.all_reduce(ones(3))
    if rank != 1:
        dist.all_reduce(ones(3))


def orders_differ(rank: int) -> None:
    calls = [lambda: dist.all_reduce(ones(4)), lambda: dist.broadcast(ones(4), src=0)]
    for call in reversed(calls) if rank == 2 else calls:
        call()


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


def splits_differ(rank: int) -> None:
    sends, receives = [[1, 3], [2, 2]][rank], [[1, 2], [4, 2]][rank]
    dist.all_to_all_single(ones(sum(receives)), ones(sum(sends)), receives, sends)


def groups_cross(rank: int) -> None:
    one, other = dist.new_group([0, 1], group_desc="one"), dist.new_group([0, 1], group_desc="other")
    for group in (one, other) if rank == 0 else (other, one):
        dist.all_reduce(ones(1), group=group)


def forms_differ(rank: int) -> None:
    if rank == 1:
        dist.all_gather([ones(2), ones(2), ones(2)], ones(2))
    else:
        programs.gather_flat(ones(6), ones(2))


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


def calls_once_more(rank: int) -> None:
    for _ in range(2 if rank == 1 else 1):
        dist.all_reduce(ones(3))


def calls_another_between(rank: int) -> None:
    dist.all_reduce(ones(3))
    if rank == 1:
        dist.broadcast(ones(3), src=0)
    dist.all_reduce(ones(3))


class Case(NamedTuple):
    """A faulty program, what the error is, and its first line.

    `calls`: by rank the call of its further line, "" for a rank at its end.
    """

    program: Callable[[int], object]
    world_size: int
    kind: str
    ranks: tuple[int, ...]
    cause: str
    calls: tuple[str, ...] = ()


W2, W3 = "of world (0 1)", "of world (0 1 2)"
DIFFER = f"ranks disagree in call #0 {W3}: the {{}}".format
IN_TWO = f"ranks disagree in {{}} #0 {W2}: {{}}".format
STUCK = "no rank can go on: rank 0 waits for rank 1 in {}, rank 1 waits for rank 0 in {}".format
LACKS = "has finished, but rank 0 waits for it in"
NEVER = "every rank has finished, but {}".format
BETWEEN = f"ranks disagree in call #1 {W3}: the op is broadcast on rank 1, all_reduce on ranks 0 2"
ROWS = "rank 0 sends 3 rows to rank 1, which expects 4"
MESSAGE = "rank {} sends float32 3 to rank {}, which receives float32 4".format
MADE = f"ranks disagree in new_group #1 {W3}: rank 0 makes it of ranks 0 1, rank 1 of ranks 0 2"
SUM = f"all_reduce #{{}} {W3}: sum {{}}".format
LATER = f"ranks disagree in recv #0 {W3}: {MESSAGE(1, 0)}"
CALL = f"all_reduce #1 {W3}"
LAST = SUM(1, "float32 3")
ORDERS = (SUM(0, "float32 4"), SUM(0, "float32 4"), f"broadcast #0 {W3}: float32 4 root 0")
SIZES = SUM(0, "float32 3"), SUM(0, "float32 4"), SUM(0, "float32 3")
SHAPES = SUM(0, "float32 3x2"), SUM(0, "float32 2x3"), SUM(0, "float32 3x2")
DTYPES = SUM(0, "float32 3"), SUM(0, "int32 3"), SUM(0, "float32 3")
ONE, OTHER = "of one (0 1)", "of other (0 1)"


def crossed(one: str, other: str) -> str:
    return STUCK(f"all_reduce #0 {one}", f"all_reduce #0 {other}")


CROSSED = f"all_reduce #0 {ONE}: sum float32 1", f"all_reduce #0 {OTHER}: sum float32 1"
CASES = [
    Case(skips, 3, "skipped", (1,), f"rank 1 {LACKS} all_reduce #1 {W3}", (LAST, "", LAST)),
    Case(
        calls_once_more, 3, "skipped", (0,), f"rank 0 has finished, but rank 1 waits for it in {CALL}", ("", LAST, "")
    ),
    Case(calls_another_between, 3, "mismatch", (1,), BETWEEN, (LAST, f"broadcast #1 {W3}: float32 3 root 0", LAST)),
    Case(orders_differ, 3, "mismatch", (2,), DIFFER("op is broadcast on rank 2, all_reduce on ranks 0 1"), ORDERS),
    Case(numels_differ, 3, "mismatch", (1,), DIFFER("shape is 4 on rank 1, 3 on ranks 0 2"), SIZES),
    Case(shapes_differ, 3, "mismatch", (1,), DIFFER("shape is 2x3 on rank 1, 3x2 on ranks 0 2"), SHAPES),
    Case(dtypes_differ, 3, "mismatch", (1,), DIFFER("dtype is int32 on rank 1, float32 on ranks 0 2"), DTYPES),
    Case(reduce_ops_differ, 3, "mismatch", (1,), DIFFER("reduce op is max on rank 1, sum on ranks 0 2")),
    Case(forms_differ, 3, "mismatch", (1,), DIFFER("form is list on rank 1, single on ranks 0 2")),
    Case(functional_differs, 3, "mismatch", (0,), DIFFER("reduce op is sum on rank 0, max on ranks 1 2")),
    Case(roots_differ, 2, "mismatch", (0, 1), IN_TWO("call", "the root is 1 on rank 1, 0 on rank 0")),
    Case(splits_differ, 2, "mismatch", (0, 1), IN_TWO("all_to_all", ROWS)),
    Case(groups_differ, 3, "mismatch", (0, 1), MADE),
    Case(messages_differ, 2, "mismatch", (0, 1), IN_TWO("recv", MESSAGE(0, 1))),
    Case(later_messages_differ, 3, "mismatch", (1, 0), LATER),  # who sends, who receives
    Case(groups_cross, 2, "deadlock", (0, 1), crossed(ONE, OTHER), CROSSED),
    Case(unnamed_groups_cross, 2, "deadlock", (0, 1), crossed("of group 2 (0 1)", "of group 3 (0 1)")),
    Case(alike_groups_cross, 2, "deadlock", (0, 1), crossed("of tp, group 1 (0 1)", "of tp, group 2 (0 1)")),
    Case(lives_differ, 2, "deadlock", (0, 1), crossed(f"{W2} of life 2", W2)),
    Case(one_ends_two_wait, 3, "skipped", (2,), f"rank 2 {LACKS} all_reduce #0 {W3}"),
    Case(tags_differ, 2, "deadlock", (0, 1), STUCK(f"send #0 {W2}", f"recv #0 {W2}")),
    Case(nobody_sends, 2, "skipped", (1,), f"rank 1 {LACKS} recv #0 {W2}"),
    Case(programs.waits_alone, 2, "skipped", (1,), f"rank 1 {LACKS} all_reduce #0 {W2}"),
    Case(never_waits_alone, 2, "skipped", (1,), NEVER(f"rank 1 never made all_reduce #0 {W2}")),
    Case(sends_into_the_void, 2, "skipped", (1,), NEVER("rank 0's send in world (0 1) was never met by rank 1")),
]
