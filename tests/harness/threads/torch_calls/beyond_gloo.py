"""Calls that not every backend serves: wrong arguments, the same on every rank, and what NCCL does and gloo does not.

A wrong argument is refused by torch's Python or a backend's C++ before anything is sent. Of calls that gloo lacks or
gets wrong the list says what each must give, and what gloo does.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.harness.threads.torch_calls.collectives import CALLS, Call, changed, dist, filled, own

MISTAKES: dict[str, Call] = {
    "all_reduce of a list": lambda r, n: dist.all_reduce([own(r, 2)]),
    "all_reduce of a number": lambda r, n: dist.all_reduce(1.0),
    "all_reduce with a word for its op": lambda r, n: dist.all_reduce(own(r, 2), "sum"),
    "all_reduce of a sparse tensor in another layout": lambda r, n: dist.all_reduce(own(r, 2, 2).to_sparse_csr()),
    "broadcast from a rank that does not exist": lambda r, n: dist.broadcast(own(r, 2), n),
    "broadcast from a negative rank": lambda r, n: dist.broadcast(own(r, 2), -1),
    "broadcast without a source": lambda r, n: dist.broadcast(own(r, 2)),
    "broadcast with both sources": lambda r, n: dist.broadcast(own(r, 2), src=0, group_src=0),
    "broadcast from a float": lambda r, n: dist.broadcast(own(r, 2), 1.0),
    "reduce to a rank that does not exist": lambda r, n: dist.reduce(own(r, 2), n),
    "all_gather into too few": lambda r, n: dist.all_gather([filled(2) for _ in range(n - 1)], own(r, 2)),
    "all_gather into too many": lambda r, n: dist.all_gather([filled(2) for _ in range(n + 1)], own(r, 2)),
    "all_gather into nothing": lambda r, n: dist.all_gather([], own(r, 2)),
    "all_gather into another dtype": lambda r, n: dist.all_gather([filled(2).float() for _ in range(n)], own(r, 2)),
    "all_gather into another size": lambda r, n: dist.all_gather([filled(3) for _ in range(n)], own(r, 2)),
    "all_gather_into_tensor of another size": lambda r, n: dist.all_gather_into_tensor(filled(2 * n + 1), own(r, 2)),
    "all_gather_into_tensor of another dtype": lambda r, n: dist.all_gather_into_tensor(
        filled(2 * n).float(), own(r, 2)
    ),
    "reduce_scatter from too few": lambda r, n: dist.reduce_scatter(filled(2), [own(r, 2) for _ in range(n - 1)]),
    "reduce_scatter of another dtype": lambda r, n: dist.reduce_scatter(
        filled(2).float(), [own(r, 2) for _ in range(n)]
    ),
    "reduce_scatter_tensor of another size": lambda r, n: dist.reduce_scatter_tensor(filled(2), own(r, 2 * n + 1)),
    "reduce_scatter_tensor of another dtype": lambda r, n: dist.reduce_scatter_tensor(filled(2).float(), own(r, 2 * n)),
    "all_to_all_single of another dtype": lambda r, n: dist.all_to_all_single(filled(n).float(), own(r, n)),
    "all_to_all_single with too few splits": lambda r, n: dist.all_to_all_single(
        filled(n), own(r, n), [1] * (n - 1), [1] * (n - 1)
    ),
    "all_to_all_single with other sums": lambda r, n: dist.all_to_all_single(filled(n), own(r, n), [2] * n, [2] * n),
    "all_to_all of too few": lambda r, n: dist.all_to_all([filled(2)] * (n - 1), [own(r, 2)] * (n - 1)),
    "all_to_all of two dtypes": lambda r, n: dist.all_to_all([filled(2).float() for _ in range(n)], [own(r, 2)] * n),
    "gather without a list": lambda r, n: dist.gather(own(r, 2), None, r),
    "gather with a list elsewhere": lambda r, n: dist.gather(own(r, 2), [filled(2)] * n, (r + 1) % n),
    "scatter without a list": lambda r, n: dist.scatter(filled(2), None, r),
    "scatter with a list elsewhere": lambda r, n: dist.scatter(filled(2), [own(r, 2)] * n, (r + 1) % n),
    "send to itself": lambda r, n: dist.send(own(r, 2), r),
    "send to a rank that does not exist": lambda r, n: dist.send(own(r, 2), n + 3),
    "receive without a tensor": lambda r, n: dist.recv([filled(2)], 0),
    "batch of nothing": lambda r, n: dist.batch_isend_irecv([]),
    "batch of what is no message": lambda r, n: dist.P2POp(dist.broadcast, own(r, 2), 0),
    "group of a rank that does not exist": lambda r, n: dist.new_group([0, n]),
    "group of one rank twice": lambda r, n: dist.new_group([0, 0]),
    "group of more ranks than there are": lambda r, n: dist.new_group(list(range(n + 1))),
    "group of another backend": lambda r, n: dist.new_group([0, 1], backend="nothing"),
    "subgroups that do not divide": lambda r, n: dist.new_subgroups(3),
    "subgroups that overlap": lambda r, n: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]),
    "timeout that is none": lambda r, n: dist.new_group([0, 1], timeout=5),
    "world made twice": lambda r, n: [dist.init_process_group("gloo"), dist.init_process_group("gloo")],
    "rank of a group that is none": lambda r, n: dist.get_group_rank(dist.group.WORLD, n + 1),
    "scatter_object_list without lists": lambda r, n: dist.scatter_object_list([], None, 0),
    "all_gather_object into too few": lambda r, n: dist.all_gather_object([None] * (n - 1), r),
    "coalescing of two kinds": lambda r, n: _two_kinds(r),
}
CALLS.update({f"mistake: {name}": make for name, make in MISTAKES.items()})


def _two_kinds(rank: int) -> None:
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(own(rank, 2))
        dist.all_gather_single(filled(8), own(rank, 2))


FLOAT8 = torch.float8_e4m3fn


class Beyond(NamedTuple):
    """A call, what a rank must get of it, and what gloo does."""

    call: Call
    right: Callable[[int, int], Any]
    on_gloo: str


def _total(size: int, *shape: int) -> Tensor:
    return torch.stack([own(rank, *shape) for rank in range(size)]).sum(0)


def _uneven_lists(rank: int, size: int) -> list[Tensor]:
    outs = [filled(rank + 1) for _ in range(size)]
    dist.all_to_all(outs, [own(rank + 10 * i, i + 1) for i in range(size)])
    return outs


NOT_ON_GLOO = {
    "sums scaled beforehand": Beyond(
        call=lambda r, n: changed(
            own(r, 2), lambda t: dist.all_reduce(t, torch._C._distributed_c10d._make_nccl_premul_sum(0.5))
        ),
        right=lambda r, n: _total(n, 2) / 2,
        on_gloo="Cannot use ReduceOp.PREMUL_SUM with Gloo",
    ),
    "averages of integers": Beyond(
        call=lambda r, n: changed(own(r, 2, dtype=torch.int32), lambda t: dist.all_reduce(t, dist.ReduceOp.AVG)),
        right=lambda r, n: (_total(n, 2) / n).to(torch.int32),
        on_gloo="no AVG of integers",
    ),
    "all_gather_into_tensor, stacked": Beyond(
        call=lambda r, n: changed(filled(n, 2), lambda out: dist.all_gather_into_tensor(out, own(r, 2))),
        right=lambda r, n: torch.stack([own(i, 2) for i in range(n)]),
        on_gloo="wants the output joined along dim 0",
    ),
    "all_gather_into_tensor, flat": Beyond(
        call=lambda r, n: changed(filled(6 * n), lambda out: dist.all_gather_into_tensor(out, own(r, 2, 3))),
        right=lambda r, n: torch.cat([own(i, 2, 3).view(-1) for i in range(n)]),
        on_gloo="wants the output joined along dim 0",
    ),
    "all_gather_into_tensor of one number": Beyond(
        call=lambda r, n: changed(filled(n), lambda out: dist.all_gather_into_tensor(out, own(r))),
        right=lambda r, n: torch.stack([own(i) for i in range(n)]),
        on_gloo="wants the output joined along dim 0",
    ),
    "reduce_scatter_tensor, stacked": Beyond(
        call=lambda r, n: changed(filled(2), lambda out: dist.reduce_scatter_tensor(out, own(r, n, 2))),
        right=lambda r, n: _total(n, n, 2)[r],
        on_gloo="wants the input joined along dim 0",
    ),
    "all_to_all of tensors of different sizes": Beyond(
        call=_uneven_lists,
        right=lambda r, n: [own(i + 10 * r, r + 1) for i in range(n)],
        on_gloo="all_to_all takes tensors of one size",
    ),
    "float8 moved": Beyond(
        call=lambda r, n: changed(
            filled(2 * n).to(FLOAT8), lambda out: dist.all_gather_into_tensor(out, own(r, 2).to(FLOAT8))
        ).double(),
        right=lambda r, n: torch.cat([own(i, 2) for i in range(n)]),
        on_gloo="Invalid scalar type",
    ),
}
"""gloo raises; the in-process engine computes what NCCL does."""


def _columns_right(rank: int, size: int) -> Tensor:
    whole = own(rank, 4, 6)
    whole[:, 1:3] = _total(size, 4, 6)[:, 1:3]
    return whole


WRONG_ON_GLOO = {
    "all_reduce of columns": Beyond(
        call=lambda r, n: changed(own(r, 4, 6), lambda whole: dist.all_reduce(whole[:, 1:3])),
        right=_columns_right,
        on_gloo="sums what lies between the columns too, and overwrites it",
    ),
    "reduce_scatter from transposed tensors": Beyond(
        call=lambda r, n: changed(
            filled(2, 3), lambda out: dist.reduce_scatter(out, [own(r + i, 3, 2).t() for i in range(n)])
        ),
        right=lambda r, n: torch.stack([own(i + r, 3, 2).t() for i in range(n)]).sum(0),
        on_gloo="takes the numbers in the order of memory",
    ),
    "all_to_all_single into a transposed tensor": Beyond(
        call=lambda r, n: changed(filled(3, n).t(), lambda out: dist.all_to_all_single(out, own(r, n, 3))),
        right=lambda r, n: torch.stack([own(i, n, 3)[r] for i in range(n)]),
        on_gloo="writes the numbers in the order of memory",
    ),
    "all_to_all_single of rows that do not divide": Beyond(
        call=lambda r, n: changed(filled(n + 1), lambda out: dist.all_to_all_single(out, own(r, n + 1))),
        right=lambda r, n: None,
        on_gloo="leaves the last row out",
    ),
    "all_to_all_single of one number": Beyond(
        call=lambda r, n: changed(filled(), lambda out: dist.all_to_all_single(out, own(r))),
        right=lambda r, n: None,
        on_gloo="sends nothing",
    ),
}
"""gloo gives another result than the right one and says nothing; NCCL and the in-process engine refuse the call."""

CALLS.update({f"beyond gloo: {name}": made.call for name, made in {**NOT_ON_GLOO, **WRONG_ON_GLOO}.items()})
