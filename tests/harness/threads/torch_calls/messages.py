"""Messages and objects: by rank and by group rank, batched, tagged, from any rank; torch's functional forms."""

from typing import Any

import torch
import torch.distributed.nn.functional as differentiable
from torch.distributed import _functional_collectives as functional

from tests.harness.threads.torch_calls.listed import dist, filled, listed, own


@listed
class Messages:
    def sends_and_receives(self, rank: int, size: int) -> Any:
        after, before, out, other = ((rank + 1) % size, (rank - 1) % size, filled(2), filled(2))
        if rank % 2:
            source = dist.recv(out, before)
            dist.send(own(rank, 2), after)
        else:
            dist.send(own(rank, 2), dst=after, group=None, tag=0)
            source = dist.recv(tensor=out, src=before, group=dist.group.WORLD)
        works = [dist.isend(own(rank, 2), after, tag=7), dist.irecv(other, before, tag=7)]
        return (out, source, [work.wait() for work in works], [work.is_completed() for work in works], other)

    def messages_by_group_rank(self, rank: int, size: int) -> Any:
        group, out, source = dist.new_group([1, 3]), filled(2), None
        if rank == 1:
            dist.send(own(rank, 2), group=group, group_dst=1)
            dist.isend(own(9, 2), group=group, group_dst=1, tag=3).wait()
        if rank == 3:
            source = dist.recv(out, group=group, group_src=0)
            dist.irecv(filled(2), group=group, group_src=0, tag=3).wait()
        return out, source

    def message_dtypes(self, rank: int, size: int) -> Any:
        kinds = (torch.bool, torch.complex64, torch.int8, torch.bfloat16, torch.float16, torch.int64)
        outs = [filled(2, dtype=dtype) for dtype in kinds]
        for out in outs:
            if rank == 0:
                dist.send(own(rank, 2, dtype=out.dtype), 1)
            if rank == 1:
                dist.recv(out, 0)
        return outs

    def messages_of_nothing_and_of_scalars(self, rank: int, size: int) -> Any:
        none, one = filled(0), torch.tensor(0.0)
        if rank == 0:
            dist.send(filled(0), 1)
            dist.send(torch.tensor(5.0), 1)
        if rank == 1:
            dist.recv(none, 0)
            dist.recv(one, 0)
        return none, one

    def batched_messages(self, rank: int, size: int) -> Any:
        out, back = filled(2), filled(2)
        after, before = (rank + 1) % size, (rank - 1) % size
        ops = [
            dist.P2POp(dist.isend, own(rank, 2), after),
            dist.P2POp(dist.irecv, out, before, group=None, tag=0),
            dist.P2POp(dist.isend, own(rank + 9, 2), before, dist.group.WORLD, tag=1),
            dist.P2POp(op=dist.irecv, tensor=back, group_peer=after, tag=1),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out, back

    def messages_from_anybody(self, rank: int, size: int) -> Any:
        if rank:
            dist.send(torch.full((1,), float(rank)), 0)
            return None
        outs = [torch.zeros(1) for _ in range(size - 1)]
        sources = [dist.recv(out) for out in outs]
        return sorted(zip(sources, [out.item() for out in outs], strict=True))

    def objects(self, rank: int, size: int) -> Any:
        mine, everyone = {"rank": rank, "text": "x" * rank}, [None] * size
        gathered = [None] * size if rank == 1 else None
        dist.all_gather_object(everyone, mine)
        dist.all_gather_object(object_list=everyone, obj=mine, group=dist.group.WORLD)
        dist.gather_object(mine, gathered, 1)
        spread, placed, part, parts = ([mine, rank], [mine], [None], [f"part {i}" for i in range(size)])
        dist.broadcast_object_list(spread, 2)
        dist.broadcast_object_list(placed, src=0, group=None, device=torch.device("cpu"))
        dist.scatter_object_list(part, parts if rank == 3 else None, 3)
        dist.scatter_object_list(part, [[i] for i in range(size)] if rank == 0 else [], src=0)
        return everyone, gathered, spread, placed, part

    def objects_by_group_rank(self, rank: int, size: int) -> Any:
        group, found = dist.new_group([3, 1]), []
        if rank in (1, 3):
            everyone, gathered, spread, part = ([None] * 2, [None] * 2 if rank == 3 else None, [rank], [None])
            dist.all_gather_object(everyone, rank, group)
            dist.gather_object(rank, gathered, group=group, group_dst=dist.get_group_rank(group, 3))
            dist.broadcast_object_list(spread, group=group, group_src=1)
            dist.scatter_object_list(part, ["a", "b"] if dist.get_rank(group) == 0 else None, group=group, group_src=0)
            found = [everyone, gathered, spread, part]
        return found

    def object_messages(self, rank: int, size: int) -> Any:
        out, source = [None, None], None
        if rank == 0:
            dist.send_object_list([{"a": 1}, "b"], 2)
            dist.send_object_list([3, 4], dst=2, device=torch.device("cpu"))
        if rank == 2:
            source = (dist.recv_object_list(out, 0), list(out), dist.recv_object_list(out, src=0, device="cpu"))
        return out, source

    def functional_collectives(self, rank: int, size: int) -> Any:
        world, ranks = dist.group.WORLD, list(range(size))
        long = own(rank, 2 * size)
        found = [
            functional.all_reduce(own(rank, 2), "SUM", world),
            functional.all_reduce(own(rank, 2), "max", ranks),
            functional.all_reduce(own(rank, 2), "avg", world.group_name),
            functional.all_gather_tensor(own(rank, 2, 3), 1, world),
            functional.reduce_scatter_tensor(own(rank, 3, 2 * size), "sum", 1, world),
            functional.broadcast(own(rank, 2), 1, world),
            functional.all_to_all_single(long, [2] * size, [2] * size, world),
            functional.all_gather_into_tensor_coalesced([own(rank, 2), own(rank, 3)], world),
            functional.reduce_scatter_tensor_coalesced([long, own(rank, size)], "sum", [0, 0], world),
            functional.all_reduce_coalesced([long, own(rank, 3)], "sum", world),
            functional.wait_tensor(torch.ops._c10d_functional.all_reduce_(own(rank, 2), "sum", world.group_name)),
            functional.permute_tensor(own(rank, 2), [(i + 1) % size for i in ranks], world),
        ]
        return [[part + 0 for part in one] if isinstance(one, list) else one + 0 for one in found]

    def functional_exchange_of_uneven_rows(self, rank: int, size: int) -> Any:
        sends, expects = ([(rank + i) % 3 for i in range(size)], [(i + rank) % 3 for i in range(size)])
        return functional.all_to_all_single(own(rank, sum(sends), 2), expects, sends, dist.group.WORLD) + 0

    def gradients_of_functional_collectives(self, rank: int, size: int) -> Any:
        world, short, long, rows = dist.group.WORLD, own(rank, 2), own(rank, 2 * size), own(rank, 2 * size)
        for leaf in (short, long, rows):
            leaf.requires_grad_()
        (functional.all_gather_tensor_autograd(short, 0, world) * own(rank + 5, 2 * size)).sum().backward()
        (functional.reduce_scatter_tensor_autograd(long, "sum", 0, world) * own(rank + 6, 2)).sum().backward()
        exchanged = functional.all_to_all_single_autograd(rows, [2] * size, [2] * size, world)
        (exchanged * own(rank + 7, 2 * size)).sum().backward()
        return short.grad, long.grad, rows.grad

    def differentiable_collectives(self, rank: int, size: int) -> Any:
        found = []
        x = own(rank, 2 * size).requires_grad_()
        for call in (
            lambda: differentiable.all_reduce(x),
            lambda: torch.cat(differentiable.all_gather(x)),
            lambda: differentiable.reduce_scatter(torch.zeros(2, dtype=x.dtype), list(x.chunk(size))),
            lambda: torch.cat(differentiable.all_to_all([torch.zeros(2, dtype=x.dtype)] * size, list(x.chunk(size)))),
            lambda: differentiable.all_to_all_single(torch.zeros_like(x), x),
            lambda: differentiable.broadcast(x, 1),
            lambda: torch.cat(differentiable.gather(x, 0)),
            lambda: differentiable.scatter(list(x.chunk(size)), 0),
        ):
            x.grad = None
            out = call()
            (out * torch.arange(1.0, 1 + out.numel(), dtype=out.dtype)).sum().backward()
            found.append((out, x.grad))
        return found

    def methods_of_a_group(self, rank: int, size: int) -> Any:
        group, tensor, spread, joined = (dist.group.WORLD, own(rank, 2), own(rank, 2), filled(2 * size))
        outs, part, out = [filled(2) for _ in range(size)], filled(2), filled(2)
        group.allreduce([tensor]).wait()
        group.allreduce(tensor, dist.ReduceOp.MAX).wait()
        group.broadcast([spread], dist.BroadcastOptions()).wait()
        group.broadcast(spread, 1).wait()
        group.allgather([outs], [own(rank, 2)]).wait()
        group.allgather(outs, own(rank, 2)).wait()
        group._allgather_base(joined, own(rank, 2)).wait()
        group.reduce_scatter(part, [own(rank + i, 2) for i in range(size)]).wait()
        total, mean, most = own(rank, 2), own(rank, 2), own(rank, 2)
        group.reduce(total, 1).wait()
        group.reduce(mean, 1, dist.ReduceOp.MIN).wait()
        group.allreduce(most, op=dist.ReduceOp.MAX).wait()
        group.scatter(out, [own(i, 2) for i in range(size)] if rank == 0 else [], 0).wait()
        group.alltoall_base(joined, joined.clone(), [], []).wait()
        group.barrier().wait()
        group.barrier(dist.BarrierOptions()).wait()
        group.monitored_barrier()
        return (tensor, spread, outs, joined, part, out, most, (total, mean) if rank == 1 else None)

    def method_messages(self, rank: int, size: int) -> Any:
        group, out = dist.group.WORLD, filled(2)
        if rank == 0:
            group.send([own(rank, 2)], 1, 5).wait()
        if rank == 1:
            group.recv([out], 0, 5).wait()
        return out

    def gather_by_method(self, rank: int, size: int) -> Any:
        outs = [filled(2) for _ in range(size)] if rank == 0 else []
        dist.group.WORLD.gather(outs, own(rank, 2), 0).wait()
        return outs
