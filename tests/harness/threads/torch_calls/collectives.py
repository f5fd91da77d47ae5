"""The list of calls of torch's collectives, filled by the modules beside this one: gathers, scatters, reductions."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

dist: Any = torch.distributed
"""Untyped on purpose: the list hands torch what its stubs do not know, too."""
Call = Callable[[int, int], Any]
CALLS: dict[str, Call] = {}
"""Name -> a function of (rank, ranks) that makes calls and returns what it got."""

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.complex128),
)
"""int16 is carried by no backend: every call with it raises."""


def listed(kind: type) -> type:
    """A class decorator: its methods are on the list under their names."""
    made = kind()
    calls = {name: getattr(made, name) for name in vars(kind) if not name.startswith("_")}
    assert not calls.keys() & CALLS.keys()
    CALLS.update(calls)
    return kind


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A rank's input: small whole numbers, different on every rank and in every place."""
    drawn = torch.randint(1, 6, shape, generator=torch.Generator().manual_seed(100 + rank))
    return drawn.to(dtype) * (1 + 2j) if dtype.is_complex else drawn.to(dtype)


def filled(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor to be overwritten."""
    return torch.full(shape, 77, dtype=dtype) if dtype is not torch.bool else torch.zeros(shape, dtype=dtype)


def changed(tensor: Tensor, call: Callable[[Tensor], Any]) -> Tensor:
    """A tensor after the call that it was handed to."""
    call(tensor)
    return tensor


def plain(value: Any) -> Any:
    """Tensors as (dtype, shape, numbers), in any nesting."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().resolve_conj().tolist())
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.item() if isinstance(value, np.generic) else value


def each(dtypes: Any, call: Any) -> dict[str, Any]:
    """Result of the call for every dtype, or that it raises."""
    found = {}
    for dtype in dtypes:
        try:
            found[str(dtype)] = call(dtype)
        except (RuntimeError, ValueError):
            found[str(dtype)] = "raised"
    return found


CALLS |= {
    "barrier_with_devices": lambda r, n: dist.barrier(device_ids=[0]),
    "transposed_broadcast": lambda r, n: changed(own(r, 4, 6), lambda whole: dist.broadcast(whole.t(), src=1)),
    "strided_all_gather_of_lists": lambda r, n: changed(
        filled(n, 4, 6), lambda out: dist.all_gather(list(out), own(r, 6, 4).t())
    ),
    "all_gather_into_columns": lambda r, n: changed(
        filled(3, n), lambda out: dist.all_gather(list(out.unbind(1)), own(r, 3))
    ),
    "all_gather_tuples": lambda r, n: changed(filled(n, 2), lambda out: dist.all_gather(out.unbind(), own(r, 2))),
}


@listed
class Collectives:
    def empty_tensors(self, rank: int, size: int) -> Any:
        none, gathered = filled(0), filled(0, 3)
        dist.all_reduce(none)
        dist.broadcast(none, 1)
        dist.all_gather([filled(0) for _ in range(size)], none)
        dist.all_gather_into_tensor(gathered, filled(0, 3))
        dist.reduce(none, 0)
        return none, gathered

    def strided_views(self, rank: int, size: int) -> Any:
        whole = own(rank, 4, 6)
        rows, middle = whole[1:3], own(rank, 8)[2:6]
        dist.all_reduce(rows)
        dist.broadcast(middle, src=2)
        return whole, middle

    def dense_tensors_of_other_orders(self, rank: int, size: int) -> Any:
        turned, channels = (own(rank, 3, 2).t(), own(rank, 2, 3, 2, 2).to(memory_format=torch.channels_last))
        total, several = (own(rank, 3, 2, 2).permute(2, 0, 1), [own(rank, 3, 2).t(), own(rank, 2)])
        dist.all_reduce(turned)
        dist.all_reduce(channels)
        dist.reduce(total, 0)
        dist.all_reduce_coalesced(several)
        return turned, channels, total if rank == 0 else None, several

    def strided_tensors_that_are_copied(self, rank: int, size: int) -> Any:
        turned = own(rank, 3, 2).t()
        joined, part, outs = (filled(3, 2 * size).t(), filled(3, 2).t(), [filled(3, 2).t() for _ in range(size)])
        dist.all_gather_into_tensor(joined, turned)
        dist.reduce_scatter_tensor(part, own(rank, 3, 2 * size).t())
        dist.all_to_all(outs, [own(rank + i, 3, 2).t() for i in range(size)])
        lists = [[filled(3, 2).t()] for _ in range(size)]
        dist.all_gather_coalesced(lists, [turned])
        gathered = [filled(3, 2).t() for _ in range(size)] if rank == 0 else None
        dist.gather(turned, gathered)
        return joined, part, outs, lists, gathered

    def outputs_that_hold_the_input(self, rank: int, size: int) -> Any:
        outs, joined, full = ([filled(3) for _ in range(size)], filled(3 * size), own(rank, 3 * size))
        outs[rank].copy_(own(rank, 3))
        dist.all_gather(outs, outs[rank])
        joined.chunk(size)[rank].copy_(own(rank, 3))
        dist.all_gather_into_tensor(joined, joined.chunk(size)[rank])
        dist.reduce_scatter_tensor(full.chunk(size)[rank], full)
        return outs, joined, full.chunk(size)[rank]

    def facts_of_a_work(self, rank: int, size: int) -> Any:
        work = dist.all_reduce(own(rank, 2), async_op=True)
        return (work.wait(), work.exception(), work.is_success(), work.synchronize(), work.source_rank())

    def all_gather_into_views(self, rank: int, size: int) -> Any:
        whole = filled(size, 3)
        dist.all_gather(list(whole.unbind()), own(rank, 3))
        chunks = filled(2 * size, 3)
        dist.all_gather(list(chunks.chunk(size)), own(rank, 2, 3))
        return whole, chunks

    def all_gather_in_every_form(self, rank: int, size: int) -> Any:
        def call(dtype: torch.dtype) -> Any:
            outs, joined, late = ([filled(2, dtype=dtype) for _ in range(size)], *(filled(2 * size, dtype=dtype),) * 2)
            dist.all_gather(outs, own(rank, 2, dtype=dtype))
            dist.all_gather_into_tensor(joined, own(rank, 2, dtype=dtype))
            dist.all_gather_into_tensor(
                output_tensor=late, input_tensor=own(rank, 2, dtype=dtype), async_op=True
            ).wait()
            return outs, joined, late

        return each(DTYPES, call)

    def all_gather_base(self, rank: int, size: int) -> Any:
        out = filled(2 * size)
        dist._all_gather_base(out, own(rank, 2))
        dist.distributed_c10d.all_gather_coalesced([[filled(2)] for _ in range(size)], [own(rank, 2)])
        return out

    def rooted_calls_for_every_root(self, rank: int, size: int) -> Any:
        found: list[Any] = []
        for root in range(size):
            spread, total, part = own(rank, 3), own(rank, 3), filled(2)
            dist.broadcast(spread, root)
            dist.reduce(total, root, op=dist.ReduceOp.MAX, async_op=True).wait()
            gathered = [filled(3) for _ in range(size)] if rank == root else None
            dist.gather(own(rank, 3), gathered, root)
            dist.scatter(part, [own(i, 2) for i in range(size)] if rank == root else None, root)
            found.append([spread, total if rank == root else None, gathered, part])
        return found

    def rooted_calls_with_empty_lists(self, rank: int, size: int) -> Any:
        part, gathered = filled(2), [filled(3) for _ in range(size)] if rank == 0 else []
        dist.gather(own(rank, 3), gathered)
        dist.scatter(part, [own(i, 2) for i in range(size)] if rank == 0 else [])
        return part, gathered

    def rooted_calls_by_group_rank(self, rank: int, size: int) -> Any:
        group, found = dist.new_group([1, 3]), list[Any]()
        if rank in (1, 3):
            spread, total, part = own(rank, 2), own(rank, 2), filled(2)
            dist.broadcast(spread, group=group, group_src=1)
            dist.reduce(total, group=group, group_dst=0)
            gathered = [filled(2), filled(2)] if rank == 3 else None
            dist.gather(own(rank, 2), gathered, group=group, group_dst=1)
            dist.scatter(part, [own(5, 2), own(6, 2)] if rank == 1 else None, group=group, group_src=0)
            found = [spread, total if rank == 1 else None, gathered, part]
        dist.destroy_process_group(group) if rank in (1, 3) else None
        return found

    def scatter_and_gather_dtypes(self, rank: int, size: int) -> Any:
        def call(dtype: torch.dtype) -> Any:
            part, outs = (filled(2, dtype=dtype), [filled(2, dtype=dtype) for _ in range(size)] if rank == 1 else None)
            dist.scatter(part, [own(i, 2, dtype=dtype) for i in range(size)] if rank == 1 else None, src=1)
            dist.gather(own(rank, 2, dtype=dtype), outs, dst=1)
            spread = own(rank, 2, dtype=dtype)
            dist.broadcast(spread, 3)
            return part, spread, outs

        return each(DTYPES, call)

    def coalesced_gathers_and_scatters(self, rank: int, size: int) -> Any:
        gathered, scattered = [filled(2 * size), filled(size)], [filled(2), filled(1)]
        with _coalescing_manager():
            for out, i in zip(gathered, (2, 1), strict=True):
                dist.all_gather_single(out, own(rank, i))
        with _coalescing_manager(async_ops=True) as manager:
            for out in scattered:
                dist.reduce_scatter_single(out, own(rank, size * len(out)))
        manager.wait()
        return gathered, scattered

    def barriers(self, rank: int, size: int) -> Any:
        found = [dist.barrier(), dist.barrier(dist.group.WORLD, False, None), dist.barrier(group=None, async_op=False)]
        work = dist.barrier(async_op=True)
        found.append(work.wait())
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=dist.default_pg_timeout, wait_all_ranks=True)
        dist.monitored_barrier(None, dist.default_pg_timeout, False)
        return found

    def works_and_futures(self, rank: int, size: int) -> Any:
        tensor = own(rank, 3)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        total = torch.futures.collect_all([future, doubled]).wait()
        return doubled.wait(), future.done(), len(total), future.value()[0]

    def numbers_of_numpy(self, rank: int, size: int) -> Any:
        spread, tensor = own(rank, 2), torch.from_numpy(np.full(3, float(rank)))
        dist.broadcast(spread, np.int64(2))
        dist.broadcast(spread, src=int(np.int32(1)))
        dist.all_reduce(tensor)
        return spread, tensor


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
