"""Reductions of tensors: dtypes, reduce ops, forms."""

import functools
from typing import Any

import torch
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.harness.threads.torch_calls.listed import CALLS, DTYPES, changed, dist, each, filled, listed, own


def reduced(rank: int, size: int, op: str, dtypes: Any = DTYPES) -> dict[str, Any]:
    def call(dtype: torch.dtype) -> torch.Tensor:
        tensor = own(rank, 3, 2, dtype=dtype)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()))
        return tensor

    return each(dtypes, call)


REDUCED: dict[str, Any] = dict.fromkeys(("sum", "max", "min", "band", "bor", "bxor"), DTYPES)
REDUCED["product"] = [d for d in DTYPES if d not in (torch.float16, torch.bfloat16)]
REDUCED["avg"] = [d for d in DTYPES if d.is_floating_point or d in (torch.bool, torch.complex64)]
CALLS.update({f"all_reduce_{op}": functools.partial(reduced, op=op, dtypes=d) for op, d in REDUCED.items()})


CALLS |= {
    "float8_sums": lambda r, n: dist.all_reduce(own(r, 3).to(torch.float8_e4m3fn)),
    "reduce_scatter_of_a_tuple": lambda r, n: changed(
        filled(2), lambda out: dist.reduce_scatter(out, tuple(own(r + i, 2) for i in range(n)))
    ),
    "reduce_scatter_of_uneven_lists": lambda r, n: changed(
        filled(r + 1), lambda out: dist.reduce_scatter(out, [own(r, i + 1) for i in range(n)])
    ),
    "empty_reduce_scatter": lambda r, n: changed(filled(0), lambda out: dist.reduce_scatter_tensor(out, filled(0))),
}


@listed
class Reductions:
    def all_reduce_old_names(self, rank: int, size: int) -> Any:
        tensor, other = own(rank, 2), own(rank, 2)
        dist.all_reduce(tensor, op=dist.reduce_op.SUM)
        dist.all_reduce(other, op=dist.ReduceOp.RedOpType.MAX)
        return tensor, other

    def all_reduce_in_every_form(self, rank: int, size: int) -> Any:
        tensors = [own(rank + 10 * i, 2) for i in range(5)]
        dist.all_reduce(tensors[0], dist.ReduceOp.MAX, None, False)
        dist.all_reduce(tensor=tensors[1], group=dist.group.WORLD)
        work = dist.all_reduce(tensors[2], async_op=True)
        done = work.wait()
        again = dist.all_reduce(tensors[3], group=dist.GroupMember.WORLD, async_op=True)
        again.wait(timeout=torch.distributed.default_pg_timeout)
        scalar = torch.tensor(float(rank))
        none = dist.all_reduce(scalar)
        facts = [work.is_completed(), work.is_success(), work.result(), again.is_completed()]
        return tensors, done, facts, scalar, none

    def all_reduce_of_what_needs_gradients(self, rank: int, size: int) -> Any:
        leaf = own(rank, 3).requires_grad_()
        with torch.no_grad():
            dist.all_reduce(leaf)
        inner = own(rank, 3).requires_grad_() * 2
        dist.all_reduce(inner.detach())
        parameter = torch.nn.Parameter(own(rank, 3))
        dist.all_reduce(parameter.data)
        dist.broadcast(torch.nn.Parameter(own(rank, 2)), 0)
        return leaf, inner, parameter, leaf.requires_grad, leaf.is_leaf

    def reduce_scatter_in_every_form(self, rank: int, size: int) -> Any:
        def call(dtype: torch.dtype) -> Any:
            parts = [own(rank + 10 * i, 2, dtype=dtype) for i in range(size)]
            out, joined, late = [filled(2, dtype=dtype) for _ in range(3)]
            dist.reduce_scatter(out, parts)
            dist.reduce_scatter_tensor(joined, torch.cat(parts))
            dist.reduce_scatter_tensor(output=late, input=torch.cat(parts), op=dist.ReduceOp.SUM, async_op=True).wait()
            return out, joined, late

        return each((torch.float64, torch.float32, torch.int64, torch.complex64), call)

    def reduce_scatter_ops(self, rank: int, size: int) -> Any:
        ops = (dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.AVG)
        outs = [filled(2) for _ in ops]
        for op, out in zip(ops, outs, strict=True):
            dist.reduce_scatter_tensor(out, own(rank, 2 * size), op)
        out = filled(2)
        dist.reduce_scatter(out, [own(rank + i, 2) for i in range(size)], dist.ReduceOp.MAX)
        return outs, out

    def all_reduce_coalesced(self, rank: int, size: int) -> Any:
        tensors = [own(rank, 2), own(rank, 3, 2), own(rank, 1, dtype=torch.float64)]
        dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX)
        again = [own(rank, 2), own(rank, 1)]
        dist.all_reduce_coalesced(again, async_op=True).wait()
        single = own(rank, 2)
        dist.all_reduce_coalesced(single)
        return tensors, again, single

    def coalescing_manager(self, rank: int, size: int) -> Any:
        tensors = [own(rank, 2), own(rank, 3)]
        with _coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        late = [own(rank, 2), own(rank, 3)]
        with _coalescing_manager(group=dist.group.WORLD, async_ops=True) as manager:
            for tensor in late:
                dist.all_reduce(tensor, dist.ReduceOp.MAX)
        manager.wait()
        with _coalescing_manager():
            pass
        return tensors, late

    def tensors_of_inference_mode(self, rank: int, size: int) -> Any:
        with torch.inference_mode():
            made, late = own(rank, 3), own(rank, 2)
        dist.all_reduce(made)
        with torch.inference_mode():
            dist.broadcast(late, 1)
        with torch.inference_mode(rank == 0):
            some = own(rank, 3)
            dist.all_reduce(some)
        return made.tolist(), late.tolist(), some.tolist()
