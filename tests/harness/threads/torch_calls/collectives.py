"""Collectives that move tensors: dtypes, layouts, sizes, asynchronous and coalesced forms."""

from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.harness.threads.torch_calls.listed import CALLS, DTYPES, changed, dist, each, filled, listed, own

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
