"""Calls on the list: messages, exchanges of all with all, and groups."""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed.nn.functional as differentiable
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from tests.harness.threads.torch_calls.collectives import CALLS, DTYPES, changed, dist, each, filled, listed, own


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


def rows(sender: int, receiver: int) -> int:
    """Rows that one rank sends to another: none for some."""
    return (sender + 2 * receiver) % 3


def exchanged(rank: int, size: int, kind: Callable[[Sequence[int]], Any]) -> torch.Tensor:
    sends, expects = ([rows(rank, other) for other in range(size)], [rows(other, rank) for other in range(size)])
    out = filled(sum(expects), 2)
    dist.all_to_all_single(out, own(rank, sum(sends), 2), kind(expects), kind(sends))
    return out


SPLITS: dict[str, Callable[[Sequence[int]], Any]] = {
    "lists": list,
    "tuples": tuple,
    "numpy_arrays": np.array,
    "numpy_integers": lambda counts: [np.int32(count) for count in counts],
    "tensors_of_one_number": lambda counts: [torch.tensor(count) for count in counts],
    "one_tensor": torch.tensor,
    "sizes": torch.Size,
    "floats": lambda counts: [float(count) for count in counts],
    "numpy_floats": lambda counts: np.array(counts, dtype=np.float64),
    "float_tensors": lambda counts: [torch.tensor(float(count)) for count in counts],
    "text": lambda counts: "".join(map(str, counts)),
}
CALLS.update({f"splits_as_{name}": functools.partial(exchanged, kind=kind) for name, kind in SPLITS.items()})


CALLS |= {
    "splits_as_ranges": lambda r, n: changed(
        filled(r * n, 1), lambda out: dist.all_to_all_single(out, own(r, sum(range(n)), 1), [r] * n, range(n))
    ),
    "splits_as_truths": lambda r, n: changed(
        filled(n), lambda out: dist.all_to_all_single(out, own(r, n), [True] * n, [np.bool_(True)] * n)
    ),
    "splits_as_sets": lambda r, n: changed(filled(n), lambda out: dist.all_to_all_single(out, own(r, n), {1}, {1})),
    "splits_into_another_shape": lambda r, n: changed(
        filled(n, 2), lambda out: dist.all_to_all_single(out, own(r, 2 * n))
    ),
    "lists_of_views": lambda r, n: changed(
        filled(2 * n, 3), lambda out: dist.all_to_all(list(out.chunk(n)), list(own(r, 2 * n, 3).chunk(n)))
    ),
    "lists_as_tuples": lambda r, n: changed(
        filled(2 * n), lambda out: dist.all_to_all(out.chunk(n), own(r, 2 * n).chunk(n))
    ),
    "lists_of_columns": lambda r, n: changed(
        filled(n, 3), lambda out: dist.all_to_all(list(out), list(own(r, 3, n).unbind(1)))
    ),
}


@listed
class Exchanges:
    def splits_empty_or_none(self, rank: int, size: int) -> Any:
        outs = [filled(2 * size, 3) for _ in range(4)]
        dist.all_to_all_single(outs[0], own(rank, 2 * size, 3))
        dist.all_to_all_single(outs[1], own(rank, 2 * size, 3), None, None)
        dist.all_to_all_single(outs[2], own(rank, 2 * size, 3), [], [])
        work = dist.all_to_all_single(output=outs[3], input=own(rank, 2 * size, 3), async_op=True)
        work.wait()
        return outs

    def splits_on_one_side(self, rank: int, size: int) -> Any:
        outs = [filled(2 * size) for _ in range(2)]
        dist.all_to_all_single(outs[0], own(rank, 2 * size), output_split_sizes=[2] * size)
        dist.all_to_all_single(outs[1], own(rank, 2 * size), input_split_sizes=np.array([2] * size))
        return outs

    def splits_of_nothing(self, rank: int, size: int) -> Any:
        none, one = filled(0, 3), filled(1 if rank == 1 else 0, 3)
        dist.all_to_all_single(none, filled(0, 3), [0] * size, [0] * size)
        dist.all_to_all_single(filled(0, 3), filled(0, 3))
        dist.all_to_all_single(
            one,
            own(rank, int(rank == 2), 3),
            [int(rank == 1 and i == 2) for i in range(size)],
            [int(rank == 2 and i == 1) for i in range(size)],
        )
        return none, one

    def exchange_dtypes(self, rank: int, size: int) -> Any:
        def call(dtype: torch.dtype) -> Any:
            out = filled(size, dtype=dtype)
            dist.all_to_all_single(out, own(rank, size, dtype=dtype))
            return out

        return each(DTYPES, call)

    def lists_of_equal_sizes(self, rank: int, size: int) -> Any:
        again = [filled(2) for _ in range(size)]
        dist.all_to_all(
            output_tensor_list=again, input_tensor_list=[own(rank + i, 2) for i in range(size)], async_op=True
        ).wait()
        return again


def summed(group: Any) -> float:
    tensor = torch.tensor([float(2 ** dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@listed
class Groups:
    def facts_of_the_world(self, rank: int, size: int) -> Any:
        world = dist.group.WORLD
        return (
            dist.get_rank(), dist.get_world_size(), dist.get_rank(world), dist.get_backend(), dist.get_backend(world),
            dist.get_process_group_ranks(None), dist.get_process_group_ranks(world), dist.is_initialized(),
            dist.get_global_rank(world, 2), dist.get_group_rank(world, 3), world.rank(), world.size(), world.group_name,
            world.group_desc, dist.get_backend_config(), dist.get_pg_count() >= 1, dist.get_node_local_rank(),
            sorted(str(device) for device in world._device_types), world.bound_device_id, world._has_hooks(),
            dist.distributed_c10d._get_pg_default_device().type, dist.distributed_c10d._get_object_coll_device(),
        )  # fmt: skip

    def options_of_new_group(self, rank: int, size: int) -> Any:
        made = [
            dist.new_group(),
            dist.new_group([0, 2]),
            dist.new_group(ranks=(1, 3), timeout=timedelta(seconds=50), backend="gloo"),
            dist.new_group([3, 0], group_desc="outer"),
            dist.new_group(list(range(size)), backend=dist.Backend.GLOO, pg_options=None),
            dist.new_group([rank], use_local_synchronization=True),
            dist.new_group(range(2)),
        ]
        found = []
        for group in made:
            inside = group != dist.GroupMember.NON_GROUP_MEMBER
            ranks = dist.get_process_group_ranks(group) if inside else None
            found.append(
                (inside, ranks, dist.get_rank(group), dist.get_world_size(group), summed(group) if inside else 0)
            )
        return found

    def calls_outside_of_a_group(self, rank: int, size: int) -> Any:
        group, tensor = dist.new_group([0, 1]), own(rank, 2)
        if rank < 2:
            return None
        outs, objects = [filled(2), filled(2)], [None, None]
        return [
            dist.all_reduce(tensor, group=group),
            dist.broadcast(tensor, 0, group),
            dist.reduce(tensor, 0, group=group),
            dist.all_gather(outs, tensor, group),
            dist.all_gather_into_tensor(filled(4), tensor, group),
            dist.reduce_scatter(tensor, outs, group=group),
            dist.reduce_scatter_tensor(tensor, filled(4), group=group),
            dist.all_to_all_single(filled(2), tensor, group=group),
            dist.all_to_all(outs, outs, group),
            dist.barrier(group),
            dist.all_gather_object(objects, 1, group),
            dist.isend(tensor, group=group, group_dst=0),
            dist.irecv(tensor, 0, group),
            dist.get_rank(group),
            dist.get_world_size(group),
            outs,
            objects,
        ]

    def subgroups(self, rank: int, size: int) -> Any:
        mine, all_of_them = dist.new_subgroups(2)
        other, _ = dist.new_subgroups(group_size=size // 2, timeout=timedelta(seconds=60), group_desc="halves")
        listed_, more = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        return ([summed(group) for group in (mine, other, listed_)], len(all_of_them), len(more))

    def group_ranks_and_back(self, rank: int, size: int) -> Any:
        group = dist.new_group([3, 1])
        if rank not in (1, 3):
            return dist.get_rank(group)
        return (
            dist.get_process_group_ranks(group), dist.get_group_rank(group, 3), dist.get_group_rank(group, 1),
            dist.get_global_rank(group, 0), dist.get_global_rank(group, 1), dist.get_rank(group), group.rank(),
        )  # fmt: skip

    def rank_lists_of_meshes(self, rank: int, size: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        flat = mesh["dp", "tp"]._flatten("all")
        groups = (mesh.get_group("dp"), mesh["tp"].get_group(), flat.get_group(), *mesh.get_all_groups())
        return [(dist.get_process_group_ranks(group), group.group_desc, summed(group)) for group in groups]

    def timeouts(self, rank: int, size: int) -> Any:
        group = dist.new_group(list(range(size)), timeout=timedelta(seconds=30))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=40), group)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=40))
        return summed(group)

    def stores(self, rank: int, size: int) -> Any:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"conformance/{rank}", str(rank))
        dist.barrier()
        return [store.get(f"conformance/{i}") for i in range(size)], store.add("conformance/count", 0)

    def destroyed_groups(self, rank: int, size: int) -> Any:
        group = dist.new_group(list(range(size)))
        before = summed(group)
        dist.destroy_process_group(group)
        return before, summed(dist.new_group([0, 1, 2, 3]))
