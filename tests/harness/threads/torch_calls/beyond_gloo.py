"""Calls that NCCL serves and gloo does not, or not right: what each must give, and what gloo does."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.harness.threads.torch_calls.listed import CALLS, Call, changed, dist, filled, own

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
