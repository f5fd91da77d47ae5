"""Groups: how they are made, what they say of themselves, and what a rank outside of one gets."""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.harness.threads.torch_calls.listed import dist, filled, listed, own


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
